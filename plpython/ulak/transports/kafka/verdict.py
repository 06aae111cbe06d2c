"""The outcome of a message as librdkafka reports it, with the prefix that the database decides by."""

from __future__ import annotations

from confluent_kafka import KafkaError

from ulak.messages.delivery import PERMANENT, RETRYABLE

# These are about the message, and a retry doesn't help. Problems with the cluster, a topic or rights can be fixed while
# the message waits.
_PERMANENT = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_RECORD,
        KafkaError._INVALID_ARG,
    )
)
# Wrong credentials or missing rights.
LOGIN = frozenset(
    (
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)
# The producer can't be used after these.
_LAST = frozenset((KafkaError._FATAL, KafkaError._FENCED, KafkaError._DESTROY))


def prefix(error: KafkaError) -> str:
    return PERMANENT if error.code() in _PERMANENT else RETRYABLE


def is_last(error: KafkaError) -> bool:
    return bool(error.fatal()) or error.code() in _LAST


def words(error: KafkaError) -> str:
    """librdkafka's words; "Local:" and "Broker:" say where it was noticed."""
    return f"{error.str()} ({error.name()})"
