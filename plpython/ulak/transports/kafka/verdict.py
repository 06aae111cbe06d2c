"""The outcome of a message as librdkafka reports it, with the prefix that the database decides by."""

from __future__ import annotations

from collections.abc import Iterable

from ulak.messages.delivery import PERMANENT, RETRYABLE
from ulak.transports.kafka.librdkafka import Problem

# Codes of rdkafka.h: those below zero are librdkafka's own, the others are of Kafka's protocol.
_DESTROY = -197
MSG_TIMED_OUT = -192
_ALL_BROKERS_DOWN = -187
_INVALID_ARG = -186
QUEUE_FULL = -184
_AUTHENTICATION = -169
_FATAL = -150
_FENCED = -144
_INVALID_MSG_SIZE = 4
_MSG_SIZE_TOO_LARGE = 10
_TOPIC_EXCEPTION = 17
_RECORD_LIST_TOO_LARGE = 18
_TOPIC_AUTHORIZATION_FAILED = 29
_CLUSTER_AUTHORIZATION_FAILED = 31
_INVALID_TIMESTAMP = 32
_SASL_AUTHENTICATION_FAILED = 58
_INVALID_RECORD = 87

# These are about the message, and a retry doesn't help. Problems with the cluster, a topic or rights can be fixed while
# the message waits.
_PERMANENT = frozenset(
    (
        _MSG_SIZE_TOO_LARGE,
        _RECORD_LIST_TOO_LARGE,
        _INVALID_MSG_SIZE,
        _TOPIC_EXCEPTION,
        _INVALID_TIMESTAMP,
        _INVALID_RECORD,
        _INVALID_ARG,
    )
)
# Wrong credentials or missing rights.
LOGIN = frozenset(
    (_AUTHENTICATION, _SASL_AUTHENTICATION_FAILED, _TOPIC_AUTHORIZATION_FAILED, _CLUSTER_AUTHORIZATION_FAILED)
)
# The producer can't be used after these.
_LAST = frozenset((_FATAL, _FENCED, _DESTROY))
# As long as the cluster has taken nothing, waiting longer wouldn't help: the credentials are wrong for all brokers, or
# all brokers are down.
_HOPELESS = frozenset((_AUTHENTICATION, _ALL_BROKERS_DOWN))


def prefix(problem: Problem) -> str:
    return PERMANENT if problem.code in _PERMANENT else RETRYABLE


def is_last(problem: Problem) -> bool:
    return problem.is_fatal or problem.code in _LAST


def is_hopeless(problem: Problem) -> bool:
    return problem.code in _HOPELESS


def words(problem: Problem) -> str:
    return f"{problem.told} ({problem.name})"


def reason(problems: Iterable[Problem]) -> str | None:
    """The last one that says more than that all brokers are down."""
    found = None
    for each in problems:
        if each.code != _ALL_BROKERS_DOWN:
            found = words(each)
    return found
