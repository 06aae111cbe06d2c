"""The values that the worker and its transports share: a message, an endpoint, and how a delivery ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ulak.safety.mask import Mask

# The prefix of an error, by which the database decides.
RETRYABLE = "[RETRYABLE]"
PERMANENT = "[PERMANENT]"
DISABLE = "[DISABLE]"
# The prefix of failures that only the message caused: the circuit breaker doesn't count them.
MESSAGE = "message:"


class ConfigError(ValueError):
    """An endpoint's config can't be used; nothing is wrong with the message."""


class MessageError(ValueError):
    """A message can't be sent, and a retry doesn't help."""


# The types made for every message are named tuples: a frozen dataclass costs four times as much to make.
class Message(NamedTuple):
    """One claimed message; payload, headers and metadata are JSON text as the database gives them."""

    id: int
    message_id: str
    attempt: int
    payload: str
    headers: str | None = None
    metadata: str | None = None
    correlation_id: str | None = None
    ordering_key: str | None = None
    created_at: str | None = None
    # Why the database couldn't hand it out; the payload is then empty.
    problem: str | None = None


# Attempts by message id: what a worker holds.
Leases = Mapping[int, int]


def leases(messages: Iterable[Message]) -> Leases:
    return {message.id: message.attempt for message in messages}


class Outcome(NamedTuple):
    """An outcome to store: error is None for delivered, otherwise it starts with [RETRYABLE] or its siblings."""

    error: str | None = None
    retry_after: int | None = None
    # JSON text, only with capture_response.
    response: str | None = None
    status: int = 0
    # The failed messages of an otherwise delivered batch: their outcomes by Message.id.
    failures: Mapping[int, Outcome] | None = None

    def of(self, message: Message) -> Outcome:
        return self if self.failures is None else self.failures.get(message.id, self)


# Delivered, and nothing else to store.
DELIVERED = Outcome(status=200)


class Settled(NamedTuple):
    """A delivery that ended."""

    endpoint_id: int
    messages: Sequence[Message]
    outcome: Outcome
    # How long it took, as the dispatcher measured.
    seconds: float = 0.0


class EndpointConfig(NamedTuple):
    """An endpoint as the database has it."""

    id: int
    name: str
    config_version: int
    # None: it can't be read.
    config: Mapping[str, Any] | None
    signing_secrets: Sequence[str] = ()
    # The values of secrets that the config refers to by name.
    secrets: Sequence[str] = ()
    protocol: str = "http"
    # Why the database handed out no config.
    problem: str | None = None
    # One list of hosts, separated by commas, for each bound secret of the config.
    bound: Sequence[str] = ()

    def keys(self) -> Mapping[str, Any]:
        """The config. Raises ConfigError if there is none."""
        if self.problem is not None:
            raise ConfigError(self.problem)
        if self.config is None:
            raise ConfigError("it can't be read: it isn't valid UTF-8, or has a number with too many digits")
        return self.config

    def parsed(self, batch_size: int, longest: float, target: Any) -> Endpoint:
        """The endpoint for the worker. `target` is the config as its transport parsed it."""
        in_flight = self.keys().get("max_in_flight")
        for value, name in ((batch_size, "batch_size"), (1 if in_flight is None else in_flight, "max_in_flight")):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a number from 1 on")
        if not 0 < longest < math.inf:
            raise ConfigError("its timeouts must be numbers above 0")
        return Endpoint(
            self.id, self.name, self.config_version, self.protocol, batch_size, in_flight, longest, target, self.bound
        )


class Endpoint(NamedTuple):
    """An endpoint as the worker knows it, whatever its protocol; made once per config_version."""

    id: int
    name: str
    config_version: int
    protocol: str
    # Messages that one delivery may carry.
    batch_size: int
    max_in_flight: int | None
    # Seconds after which any delivery has ended.
    longest: float
    # The config as its transport parsed it; nothing else looks into it.
    target: Any
    # The hosts that its secrets are bound to, as in EndpointConfig.
    bound: Sequence[str] = ()


def grouped(
    messages: Iterable[Message], most: int, max_bytes: int, are_alike: Callable[[Message, Message], bool] | None = None
) -> list[list[Message]]:
    """Messages in groups, in order. A group has at most this many messages and bytes, and its messages are alike. A
    message larger than the limit has a group of its own."""
    groups: list[list[Message]] = []
    size = 0
    for message in messages:
        length = len(message.payload)
        if (
            groups
            and len(groups[-1]) < most
            and size + length <= max_bytes
            and (are_alike is None or are_alike(groups[-1][0], message))
        ):
            groups[-1].append(message)
            size += length
        else:
            groups.append([message])
            size = length
    return groups


def config_problem(error: ConfigError, secrets: Iterable[str]) -> str:
    return f"config: {Mask(secrets).hide(str(error))}"
