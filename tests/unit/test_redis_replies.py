"""Redis replies, whole and in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some
from ulak.transports.redis.replies import BadReply, Refusal, Replies, Status

ANSWERS = b"+OK\r\n$15\r\n1731842400000-0\r\n$-1\r\n-OOM command not allowed\r\n:7\r\n$0\r\n\r\n"
MEANT = [b"OK", b"1731842400000-0", None, Refusal("OOM command not allowed"), b"7", b""]


@given(some.lists(some.integers(0, len(ANSWERS))))
def test_replies_are_the_same_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    replies = Replies()
    places = [0, *sorted(cuts), len(ANSWERS)]

    found = [reply for start, end in pairwise(places) for reply in replies.read(ANSWERS[start:end])]

    assert found == MEANT
    assert isinstance(found[3], Refusal)
    assert [isinstance(reply, Status) for reply in found] == [True, False, False, False, True, False]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$99999999\r\n",
        b"$2\r\nabc\r\n",
        b"x" * 100_000,
        b"*1\r\n",
    ],
)
def test_a_server_that_does_not_speak_the_protocol_is_detected(answer: bytes) -> None:
    with pytest.raises(BadReply):
        list(Replies().read(answer))


def test_a_refusal_does_not_quote_the_command() -> None:
    refusal = Refusal("ERR unknown command 'XADD', with args beginning with: 'orders' '*' 'payload' '{\"card\": 42")

    assert refusal.code == "ERR"
    assert refusal.told == "ERR unknown command"
    assert Refusal("OOM command not allowed when used memory > 'maxmemory'.").told.endswith("> 'maxmemory'.")
