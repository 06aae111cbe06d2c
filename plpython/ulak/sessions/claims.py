"""What a claim returns, as messages by endpoint. Large texts are left out, to be read one by one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ulak.messages.delivery import Message
from ulak.sessions.session import Rows
from ulak.worker.port import Claimed

# Stands for a text that wasn't read with the claim. JSON is never empty.
APART = ""
# Messages with a text longer than this are read one by one: so a claim of 500 returns at most 16 MB at once, of which
# PostgreSQL and PL/Python keep several copies, and a message that can't be read doesn't affect the others of its claim.
LARGE_MESSAGE = 32_768
# The same by stored bytes, for a claim of new messages, which takes at most so many.
LARGE_NEW = 8192
MOST_NEW = 16
# No text is read with the claim.
NO_TEXTS = -1
# How much one claim reads of large messages; the rest goes back to the queue.
LARGE_TOGETHER = 32 * 1024 * 1024

_message = operator.itemgetter(*Message._fields[:-1])


def of_columns(row: Mapping[str, Any]) -> list[Claimed]:
    """Groups claimed messages by endpoint, in the order of their turns."""
    nothing = itertools.repeat(None)
    messages = map(
        Message,
        row["ids"],
        row["message_ids"],
        row["attempts"],
        row["payloads"],
        row["headers"] or nothing,
        row["metadata"] or nothing,
        row["correlation_ids"] or nothing,
        row["ordering_keys"] or nothing,
        row["created_at"],
    )
    return _grouped(messages, row["endpoint_ids"], row["config_versions"], row["have_more"] or ())


def of_rows(rows: Rows) -> list[Claimed]:
    """The same, of a claim that returns a row for each message."""
    messages = [Message(*_message(row)) for row in rows]
    return _grouped(messages, [row["endpoint_id"] for row in rows], [row["config_version"] for row in rows])


def _grouped(
    messages: Iterable[Message], endpoint_ids: Iterable[int], versions: Iterable[int], have_more: Sequence[int] = ()
) -> list[Claimed]:
    found: dict[int, Claimed] = {}
    for message, endpoint_id, version in zip(messages, endpoint_ids, versions, strict=True):
        claimed = found.get(endpoint_id)
        if claimed is None:
            claimed = found[endpoint_id] = Claimed(endpoint_id, version, [], endpoint_id in have_more)
        claimed.messages.append(message)
    return list(found.values())
