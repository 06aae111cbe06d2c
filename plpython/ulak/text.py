"""Text from outside, made safe to keep: one readable line of bounded length, and nothing that the database refuses."""

from __future__ import annotations

import re

# An error is a line to read, whoever wrote it.
LONGEST_LINE = 1000

# Control characters, white space, and what turns the direction of a text.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\s]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")

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
    """What a database of this encoding can hold of it, as text and within JSON."""
    text = _UNSTORABLE.sub("\ufffd", text)
    codec = _CODECS.get(encoding, "ascii")
    return text if codec == "utf-8" or text.isascii() else text.encode(codec, "replace").decode(codec)


def plain(text: str) -> str:
    """ASCII, which every database holds."""
    return storable(text, "SQL_ASCII")
