"""The outcome of a message as librdkafka reports it, with the prefix that the database decides by."""

from __future__ import annotations

from confluent_kafka import KafkaError

from ulak.messages.delivery import PERMANENT, RETRYABLE

# These are about the message, and no waiting mends them. Whatever is wrong with the cluster, with a topic or with what
# this client may do can be put right while the message waits.
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
# About who we are, or what we may do.
_LOGIN = frozenset(
    (
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)
# The producer can't go on after these: another one has to be made.
_LAST = frozenset((KafkaError._FATAL, KafkaError._FENCED, KafkaError._DESTROY))


def prefix(error: KafkaError) -> str:
    return PERMANENT if error.code() in _PERMANENT else RETRYABLE


def is_login(error: KafkaError) -> bool:
    return error.code() in _LOGIN


def is_last(error: KafkaError) -> bool:
    return bool(error.fatal()) or error.code() in _LAST


def words(error: KafkaError) -> str:
    """Its own, as far as they help: librdkafka's "Local:" and "Broker:" say where it was noticed."""
    return f"{error.str()} ({error.name()})"
