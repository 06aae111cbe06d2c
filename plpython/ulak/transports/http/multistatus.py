"""The answer to a batch of which some messages failed: 207 and {"failed": [...]}.

Each element is a message's id, or its place in the array from 0, or an object with "id" or "index", and "error" (text)
and "permanent" (true or false) if the receiver likes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ulak.transports.http.model import Message

_LONGEST_ERROR = 800


class Refusal(NamedTuple):
    message: Message
    error: str = ""
    is_permanent: bool = False


def parse(body: bytes, messages: Sequence[Message]) -> list[Refusal]:
    """Raises ValueError if it can't be understood: it is unknown then what was delivered."""
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it isn't JSON") from None
    failed = answer.get("failed") if isinstance(answer, dict) else None
    if not isinstance(failed, list):
        raise ValueError('it has no list "failed"')
    by_id = {message.message_id: message for message in messages}
    return [_refusal(each, messages, by_id) for each in failed]


def _refusal(each: Any, messages: Sequence[Message], by_id: dict[str, Message]) -> Refusal:
    told = each if isinstance(each, dict) else {}
    key = told.get("id", told.get("index")) if told else each
    message = None
    if isinstance(key, str):
        message = by_id.get(key.lower())
    # In Python, True is an int.
    elif isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(messages):
        message = messages[key]
    if message is None:
        raise ValueError("it names a message that isn't in the batch")
    error = told.get("error")
    return Refusal(message, error[:_LONGEST_ERROR] if isinstance(error, str) else "", told.get("permanent") is True)
