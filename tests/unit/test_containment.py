"""What fails for one message, or by a bug of ours, stays with that message."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest
from support.deliveries import Deliveries, settle_all
from support.receiver import Answer, Receiver
from ulak.messages.delivery import Settled
from ulak.transports.http import request, verdict
from ulak.transports.http.model import Outcome


def settle(deliveries: Deliveries) -> list[Settled]:
    return sorted(settle_all(deliveries), key=lambda each: each.messages[0].id)


def test_a_lack_of_sockets_is_worth_another_try(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoneLeft:
        """In place of the module, for the client alone: other threads still open sockets."""

        AF_INET, AF_INET6 = socket.AF_INET, socket.AF_INET6

        @staticmethod
        def socket(*_: object) -> socket.socket:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    endpoint = make_endpoint(receiver.url)
    with monkeypatch.context() as patch:
        patch.setattr("ulak.transports.http.client.socket", NoneLeft)
        deliveries.send(endpoint, [make_message()])
        (without,) = settle(deliveries)
    deliveries.send(endpoint, without.messages)
    (again,) = settle(deliveries)

    assert without.outcome.error == "[RETRYABLE] connect: no socket for 127.0.0.1: Too many open files"
    assert again.outcome.error is None


def test_an_answer_that_our_code_cannot_read_is_worth_another_try(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = verdict.judge

    def judge(endpoint: Any, finished: Any, now: float, messages: Any) -> Outcome:
        if b"bad" in finished.request.body:
            raise ZeroDivisionError("a bug")
        return judged(endpoint, finished, now, messages)

    monkeypatch.setattr("ulak.transports.http.transport.verdict.judge", judge)
    receiver.answer = Answer(201)
    endpoint = make_endpoint(receiver.url)
    deliveries.send(endpoint, [make_message(1, '"bad"')])
    deliveries.send(endpoint, [make_message(2)])

    bad, good = settle(deliveries)

    assert bad.outcome.error == "[RETRYABLE] network: the answer can't be read: ZeroDivisionError"
    assert good.outcome.error is None
    assert deliveries.in_flight == 0


def test_a_message_that_our_code_cannot_send_leaves_the_others_alone(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = request.build

    def building(endpoint: Any, messages: Any, *rest: Any) -> Any:
        if messages[0].id == 1:
            raise ZeroDivisionError("a bug")
        return build(endpoint, messages, *rest)

    monkeypatch.setattr("ulak.transports.http.transport.request.build", building)
    endpoint = make_endpoint(receiver.url)
    deliveries.send(endpoint, [make_message(1)])
    deliveries.send(endpoint, [make_message(2)])

    bad, good = settle(deliveries)

    assert bad.outcome.error == "[PERMANENT] message: it can't be built: ZeroDivisionError"
    assert good.outcome.error is None
