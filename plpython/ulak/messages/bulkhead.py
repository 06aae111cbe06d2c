"""The seam around all code that handles data from messages, configs, receivers, brokers and token servers.

Whatever such code raises becomes an outcome: of that message if nothing can be built of it, else of its endpoint.
Nothing else is touched, and the loop goes on. There are three walls, each inside the next:

- a message: bulkhead.fault() tells whose fault it is that nothing can be built of it;
- an exchange or a connection: http/transport.py and broker/link.py fail what is under way over it;
- a transport: transports/dispatcher.py fails what it has under way, and makes another one.

A cancel isn't an Exception (session.Cancelled), so it passes all of them. Code behind the seam asks nothing of the
database: only the line of a log endpoint is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ulak.messages.delivery import MESSAGE, PERMANENT, RETRYABLE, ConfigError, Message, MessageError, Outcome, Settled

Result = TypeVar("Result")

# A plain message that every endpoint can send, unless its config is at fault.
PLAIN = Message(0, "00000000-0000-7000-8000-000000000000", 1, "{}")


def fault(error: Exception, build: Callable[[Message], object]) -> str:
    """The error of a message for which build() failed. If not even a plain message can be built, it is the config's
    fault, and the message is retried."""
    if isinstance(error, MessageError):
        return f"{PERMANENT} {MESSAGE} {error}"
    if isinstance(error, ConfigError):
        return f"{RETRYABLE} config: {error}"
    if isinstance(error, MemoryError):
        return f"{RETRYABLE} worker: there is no memory for the message"
    try:
        build(PLAIN)
    except MessageError:
        # It has no metadata for a route, for example: the config is sound.
        pass
    except Exception as another:
        return f"{RETRYABLE} config: no message can be built: {kind(another)}"
    return unbuildable(error)


def unbuildable(error: Exception) -> str:
    return f"{PERMANENT} {MESSAGE} it can't be built: {kind(error)}"


def kind(error: Exception) -> str:
    """The text of a foreign error might quote its cause: a secret, or a payload."""
    return type(error).__name__


def broken(endpoint_id: int, messages: Sequence[Message], error: Exception) -> Settled:
    """A delivery whose transport has failed, for whatever reason."""
    return Settled(endpoint_id, messages, Outcome(f"{RETRYABLE} worker: the transport failed: {kind(error)}"))


def contained(callback: Callable[..., Result], otherwise: Result) -> Callable[..., Result]:
    """A callback for a C library. An exception can't pass through C: some libraries ignore it, some end all their
    transfers. So the callback returns `otherwise` instead, and only what it was called for fails."""

    def call(*arguments: Any) -> Result:
        try:
            return callback(*arguments)
        except Exception:
            return otherwise

    return call
