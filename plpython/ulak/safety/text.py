"""Text from outside, made safe to keep: one readable line of bounded length, and nothing that the database refuses."""

from __future__ import annotations

import re

# An error is one readable line, wherever it comes from.
LONGEST_LINE = 1000

# What can't stand in XML, what a terminal obeys, and what nobody sees: control characters, noncharacters, what turns
# the direction of a text or has no width. ulak_private.error_line() has the same.
_NONCHARACTERS = "\ufdd0-\ufdef" + "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
_UNSEEN = "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_UNPRINTABLE = re.compile(rf"[\x00-\x1f\x7f-\x9f{_UNSEEN}{_NONCHARACTERS}\s]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Neither the database nor XML accepts it, not even within JSON.
_UNSTORABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

# By PostgreSQL's names. What isn't here is either unknown to Python or, as SQL_ASCII, no encoding at all: a text that
# SQL cuts in two must still be readable, so it is ASCII.
_CODECS = {
    "UTF8": "utf-8",
    "EUC_CN": "gb2312",
    "EUC_JP": "euc_jp",
    "EUC_KR": "euc_kr",
    "KOI8R": "koi8_r",
    "KOI8U": "koi8_u",
    "ISO_8859_5": "iso8859_5",
    "ISO_8859_6": "iso8859_6",
    "ISO_8859_7": "iso8859_7",
    "ISO_8859_8": "iso8859_8",
    "LATIN1": "latin_1",
    "LATIN2": "iso8859_2",
    "LATIN3": "iso8859_3",
    "LATIN4": "iso8859_4",
    "LATIN5": "iso8859_9",
    "LATIN6": "iso8859_10",
    "LATIN7": "iso8859_13",
    "LATIN8": "iso8859_14",
    "LATIN9": "iso8859_15",
    "LATIN10": "iso8859_16",
    "WIN866": "cp866",
    "WIN874": "cp874",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "WIN1253": "cp1253",
    "WIN1254": "cp1254",
    "WIN1255": "cp1255",
    "WIN1256": "cp1256",
    "WIN1257": "cp1257",
    "WIN1258": "cp1258",
}


def line(text: str, longest: int = LONGEST_LINE) -> str:
    """On one line, printable, and cut where it gets too long."""
    text = text[: 4 * longest]
    if not text.isprintable() or "  " in text:
        text = _UNPRINTABLE.sub(" ", _SURROGATE.sub("\ufffd", text))
    text = text.strip()
    return text if len(text) <= longest else text[:longest] + "..."


def storable(text: str, encoding: str = "UTF8") -> str:
    """The text as a database of this encoding can store it, as text and within JSON."""
    text = _UNSTORABLE.sub("\ufffd", text)
    codec = _CODECS.get(encoding, "ascii")
    return text if codec == "utf-8" or text.isascii() else text.encode(codec, "replace").decode(codec)


def plain(text: str) -> str:
    """ASCII, which every database holds."""
    return storable(text, "SQL_ASCII")
