"""Text from outside, made safe to keep: one readable line of bounded length, and nothing that the database refuses."""

from __future__ import annotations

import codecs
import re

# An error is one readable line, wherever it comes from.
LONGEST_LINE = 1000

# Characters that XML forbids, that control a terminal, or that are invisible: control characters, noncharacters,
# changes of direction, zero width. The same as in ulak_private.error_line().
_NONCHARACTERS = "\ufdd0-\ufdef" + "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
_UNSEEN = "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_UNPRINTABLE = re.compile(rf"[\x00-\x1f\x7f-\x9f{_UNSEEN}{_NONCHARACTERS}\s]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Neither the database nor XML accepts these, not even in JSON.
_UNSTORABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def line(text: str, longest: int = LONGEST_LINE) -> str:
    """One printable line, cut if it is too long."""
    text = text[: 4 * longest]
    if not text.isprintable() or "  " in text:
        text = _UNPRINTABLE.sub(" ", _SURROGATE.sub("\ufffd", text))
    text = text.strip()
    return text if len(text) <= longest else text[:longest] + "..."


def storable(text: str, encoding: str = "UTF8") -> str:
    """The text as a database of this encoding can store it, as text and within JSON."""
    text = _UNSTORABLE.sub("\ufffd", text)
    codec = _codec(encoding)
    return text if codec == "utf-8" or text.isascii() else text.encode(codec, "replace").decode(codec)


def _codec(encoding: str) -> str:
    """PostgreSQL's names are Python's but for two prefixes. ASCII for encodings that Python doesn't know, and for
    SQL_ASCII, which is none: a text that SQL cuts in two must still be readable."""
    try:
        return codecs.lookup(encoding.replace("WIN", "CP").replace("KOI8", "KOI8-")).name
    except LookupError:
        return "ascii"


def plain(text: str) -> str:
    """ASCII, which every database can store."""
    return storable(text, "SQL_ASCII")
