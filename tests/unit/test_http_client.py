"""The HTTP client against real receivers on loopback."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pycurl
import pytest
from support import hostile
from support.deliveries import Exchanges, patient
from support.hostile import Hostile
from support.ports import start_on_free_port
from support.receiver import Answer, Received, Receiver
from support.sessions import PATIENCE, patience, wait_until
from ulak.safety.address import Guard
from ulak.transports.http.model import Finished, Request


def exchange(exchanges: Exchanges, requests: Sequence[Request]) -> list[Finished]:
    """Starts them all and steps until all have ended."""
    for each in requests:
        exchanges.start(each)
    finished: list[Finished] = []

    def have_ended() -> bool:
        finished.extend(exchanges.step(0.1))
        return len(finished) >= len(requests)

    wait_until(have_ended, f"the end of {len(requests)} exchanges", interval=0)
    assert exchanges.in_flight == 0
    return finished


def post(url: str, body: bytes = b"{}", headers: Sequence[str] = (), tag: object = None, **options: Any) -> Request:
    return Request(patient(url, **options), list(headers), body, tag)


def test_a_request_arrives_as_it_was_built(exchanges: Exchanges, receiver: Receiver) -> None:
    (finished,) = exchange(exchanges, [post(receiver.url, b'{"a": 1}', ["x-test: yes", "content-type: text/x"])])

    (got,) = receiver.requests
    assert (finished.status, finished.kind, finished.error) == (200, None, None)
    assert (got.method, got.path, got.body) == ("POST", "/hook", b'{"a": 1}')
    assert got.headers == {
        "host": f"127.0.0.1:{receiver.port}",
        "accept": "*/*",
        "x-test": "yes",
        "content-type": "text/x",
        "content-length": "8",
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_every_method_sends_the_body(exchanges: Exchanges, receiver: Receiver, method: str) -> None:
    exchange(exchanges, [post(receiver.url, b"{}", method=method)])

    assert (receiver.requests[0].method, receiver.requests[0].body) == (method, b"{}")


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_bodies_of_every_size_arrive_whole(exchanges: Exchanges, receiver: Receiver, size: int) -> None:
    exchange(exchanges, [post(receiver.url, b"x" * size)])

    assert len(receiver.requests[0].body) == size
    assert "expect" not in receiver.requests[0].headers


def test_many_exchanges_each_come_back_once_over_few_connections(exchanges: Exchanges, receiver: Receiver) -> None:
    profile = patient(receiver.url)
    finished = []
    for start in range(0, 500, 20):
        batch = [Request(profile, [], b"%d" % number, number) for number in range(start, start + 20)]
        finished += exchange(exchanges, batch)

    assert sorted(each.request.tag for each in finished) == list(range(500))  # type: ignore[type-var]
    assert sorted(int(each.body) for each in receiver.requests) == list(range(500))
    assert receiver.connections <= 20


def test_one_handle_serves_different_receivers_without_a_trace_of_the_last(receiver: Receiver) -> None:
    exchanges = Exchanges(Guard(allow_internal=True), max_connections=1)
    with Receiver() as other:
        first = post(receiver.url, b"1", ["x-first: 1"], method="PUT")
        exchange(exchanges, [first])
        exchange(exchanges, [post(other.url, b"2")])
    exchanges.close()

    (got,) = other.requests
    assert (got.method, got.body, "x-first" in got.headers) == ("POST", b"2", False)


def test_light_traffic_to_many_receivers_keeps_their_connections(exchanges: Exchanges) -> None:
    receivers = [Receiver() for _ in range(8)]
    for _ in range(3):
        for each in receivers:
            exchange(exchanges, [post(each.url)])

    assert [each.connections for each in receivers] == [1] * 8
    for each in receivers:
        each.close()


def test_a_path_is_sent_as_it_is_written(exchanges: Exchanges, receiver: Receiver) -> None:
    exchange(exchanges, [post(receiver.origin + "/a/../b/./c?d=/../e")])

    assert receiver.requests[0].path == "/a/../b/./c?d=/../e"


def test_a_redirect_is_not_followed(exchanges: Exchanges, receiver: Receiver) -> None:
    receiver.answer = Answer(302, {"location": "http://169.254.169.254/latest/meta-data"})

    (finished,) = exchange(exchanges, [post(receiver.url)])

    assert (finished.status, len(receiver.requests)) == (302, 1)


@pytest.mark.parametrize(
    "behaviour", [hostile.closes_instead_of_a_second_answer, hostile.resets_instead_of_a_second_answer]
)
def test_a_reused_connection_that_was_closed_unseen_is_replaced_at_once(
    exchanges: Exchanges, behaviour: hostile.Behaviour
) -> None:
    with Hostile(behaviour) as server:
        profile = patient(server.url)
        # More than the five times that libcurl repeats by itself in the life of a handle.
        finished = [exchange(exchanges, [Request(profile, [], b"{}")])[0] for _ in range(20)]

        assert [(each.status, each.error) for each in finished] == [(200, None)] * 20
        assert server.connections == 20


def test_a_request_is_sent_again_once_and_not_more(exchanges: Exchanges) -> None:
    with Hostile(hostile.resets_after_one_answer) as server:
        profile = patient(server.url)
        first = exchange(exchanges, [Request(profile, [], b"{}")])[0]
        second = exchange(exchanges, [Request(profile, [], b"{}")])[0]

        assert (first.status, second.kind) == (200, "network")
        # The first one's, and one more for the second's only repetition.
        assert server.connections == 2


def test_a_new_connection_that_is_reset_is_not_tried_again(exchanges: Exchanges) -> None:
    with Hostile(hostile.resets) as server:
        (finished,) = exchange(exchanges, [post(server.url)])

        assert finished.kind == "network"
        assert server.connections == 1


def test_a_handle_that_sent_again_reuses_connections_afterwards(exchanges: Exchanges) -> None:
    with Hostile(hostile.resets_the_first_connections) as server:
        profile = patient(server.url)
        statuses = [exchange(exchanges, [Request(profile, [], b"{}")])[0].status for _ in range(15)]

        assert statuses == [200] * 15
        assert server.connections == 9


def test_connections_that_are_closed_after_each_answer_lose_no_message(exchanges: Exchanges) -> None:
    with Receiver(Answer(close=True)) as receiver:
        profile = patient(receiver.url)
        finished = [exchange(exchanges, [Request(profile, [], b"{}")])[0] for _ in range(200)]

        assert {(each.status, each.error) for each in finished} == {(200, None)}


def test_a_new_socket_under_an_old_number_is_watched(exchanges: Exchanges, receiver: Receiver) -> None:
    handle = exchanges.client._prepared(patient(receiver.url))
    address = (socket.AF_INET, socket.SOCK_STREAM, 0, ("127.0.0.1", receiver.port))

    def reopened() -> socket.socket:
        old = handle.open_socket(0, address)
        number = old.fileno()
        exchanges.client._watch(pycurl.POLL_IN, number, None, None)
        exchanges.client._watch(pycurl.POLL_REMOVE, number, None, None)
        old.close()
        new: socket.socket = handle.open_socket(0, address)
        if new.fileno() == number:
            return new
        # Another thread was faster.
        new.close()
        return reopened()

    with reopened() as new:
        new.connect(address[3])
        exchanges.client._watch(pycurl.POLL_IN, new.fileno(), None, None)
        new.sendall(b"POST / HTTP/1.1\r\n\r\n")

        assert [fd for fd, _ in exchanges.wait(patience())] == [new.fileno()]


def test_a_receiver_that_restarts_gets_the_next_message(exchanges: Exchanges) -> None:
    # At a port that no other program gets meanwhile.
    with start_on_free_port(lambda port: Receiver(port=port)) as first:
        exchange(exchanges, [post(first.url)])

    (finished,) = exchange(exchanges, [post(first.url)])

    assert finished.kind == "connect"
    with Receiver() as second:
        assert exchange(exchanges, [post(second.url)])[0].status == 200


def test_no_proxy_is_taken_from_the_environment(
    exchanges: Exchanges, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert exchange(exchanges, [post(receiver.url)])[0].status == 200


def test_a_configured_proxy_gets_the_request_and_its_own_credentials(make_endpoint: Any, exchanges: Exchanges) -> None:
    with Receiver() as proxy:
        config = {"url": proxy.origin, "username": "ada", "password": "lovelace"}
        profile = make_endpoint("http://hook.invalid/path", proxy=config).profile

        (finished,) = exchange(exchanges, [Request(profile, [], b"{}")])

        (got,) = proxy.requests
        assert finished.status == 200
        assert got.path == "http://hook.invalid/path"
        assert got.headers["proxy-authorization"] == "Basic YWRhOmxvdmVsYWNl"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "http://[::1]:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f.1:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
    ],
)
def test_an_internal_address_is_not_dialled_however_it_is_written(receiver: Receiver, url: str) -> None:
    exchanges = Exchanges(Guard())

    (finished,) = exchange(exchanges, [post(url.format(port=receiver.port))])

    assert finished.kind == "blocked"
    assert finished.error is not None
    assert "is blocked (" in finished.error
    assert receiver.connections == 0
    exchanges.close()


def test_a_blocked_proxy_is_not_dialled_either(make_endpoint: Any, receiver: Receiver) -> None:
    exchanges = Exchanges(Guard())
    profile = make_endpoint("http://example.com/", proxy={"url": receiver.origin}).profile

    (finished,) = exchange(exchanges, [Request(profile, [], b"")])

    assert finished.kind == "blocked"
    assert (finished.error or "").startswith("address 127.0.0.1 is blocked (loopback, 127.0.0.0/8); to allow it: ")
    assert receiver.connections == 0
    exchanges.close()


def test_the_allow_list_admits_what_it_names(receiver: Receiver) -> None:
    exchanges = Exchanges(Guard(allowed=["127.0.0.1/32"]))

    assert exchange(exchanges, [post(receiver.url)])[0].status == 200
    assert exchange(exchanges, [post(receiver.url.replace("127.0.0.1", "127.0.0.2"))])[0].kind == "blocked"
    exchanges.close()


def test_a_block_is_reported_even_by_a_handle_that_has_dialled_before(receiver: Receiver) -> None:
    exchanges = Exchanges(Guard(allowed=["127.0.0.1/32"]), max_connections=1)
    exchange(exchanges, [post(receiver.url)])

    assert exchange(exchanges, [post("http://127.0.0.2:9/")])[0].kind == "blocked"
    exchanges.close()


def test_what_is_not_captured_is_not_kept_but_for_an_excerpt(exchanges: Exchanges, receiver: Receiver) -> None:
    receiver.answer = Answer(500, {"x-info": "y"}, b"e" * 5000)

    (finished,) = exchange(exchanges, [post(receiver.url, keep_body=512)])

    assert (finished.status, finished.body, finished.headers) == (500, b"e" * 512, ())


def test_a_captured_answer_has_headers_body_and_timing(exchanges: Exchanges, receiver: Receiver) -> None:
    receiver.answer = Answer(201, {"x-info": "y"}, b"hello", delay=0.2)

    (finished,) = exchange(exchanges, [post(receiver.url, capture_response=True, keep_body=4)])

    assert b"x-info: y\r\n" in finished.headers
    assert (finished.body, finished.truncated) == (b"hell", True)
    assert finished.seconds is not None and finished.first_byte_seconds is not None
    # Half of the delay: two clocks may differ a little. At its time-out libcurl would have given up.
    assert 0.1 <= finished.first_byte_seconds <= finished.seconds <= PATIENCE


def test_one_answer_does_not_leak_into_the_next(exchanges: Exchanges, receiver: Receiver) -> None:
    answers = iter([Answer(503, {"retry-after": "9"}, b"busy"), Answer(503)])
    receiver.answer = lambda got: next(answers)
    profile = patient(receiver.url)

    first, second = (exchange(exchanges, [Request(profile, [], b"")])[0] for _ in range(2))

    assert b"retry-after: 9\r\n" in first.headers
    assert b"retry-after: 9\r\n" not in second.headers
    assert (first.body, second.body) == (b"busy", b"")


def test_a_body_up_to_its_limit_leaves_the_connection_usable(exchanges: Exchanges, receiver: Receiver) -> None:
    receiver.answer = Answer(body=b"x" * 60_000)

    for _ in range(3):
        exchange(exchanges, [post(receiver.url)])

    assert receiver.connections == 1


def test_a_client_asks_to_be_advanced_before_a_request_is_over_and_not_while_there_is_none(
    exchanges: Exchanges,
) -> None:
    idle = exchanges.client.timeout()
    with Hostile(hostile.never_answers) as server:
        exchanges.start(post(server.url))
        exchanges.step(0.1)
        left = exchanges.client.timeout()

    assert idle is None
    # Rounded up.
    assert left is not None and left <= PATIENCE + 1


def test_a_connection_that_its_receiver_closes_is_forgotten(
    exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll reports it again and again until it is forgotten, and a worker that waits for others would never sleep. Some are forgotten
    before: a connection may be idle while epoll still waits until it can be written to."""
    forgotten: list[int] = []
    forget = exchanges.descriptors.forget

    def note(descriptor: int) -> None:
        forgotten.append(descriptor)
        forget(descriptor)

    def are_forgotten() -> bool:
        exchanges.client.advance(exchanges.wait(0))
        return len(forgotten) == closing.connections

    monkeypatch.setattr(exchanges.descriptors, "forget", note)
    with Receiver() as closing:
        exchange(exchanges, [post(closing.url) for _ in range(20)])

    wait_until(are_forgotten, "the end of each connection")

    assert not any(exchanges.wait(0) for _ in range(100))
    assert len({*forgotten}) == len(forgotten)


def test_a_request_that_cannot_be_made_fails_alone(exchanges: Exchanges, receiver: Receiver) -> None:
    broken = Request(patient("http://exämple.com/"), [], b"", "broken")

    finished = exchange(exchanges, [broken, post(receiver.url, tag="fine")])

    results = {each.request.tag: each for each in finished}
    assert results["broken"].kind == "config"
    assert results["fine"].status == 200


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"])
def test_only_http_and_https_are_spoken(exchanges: Exchanges, url: str) -> None:
    (finished,) = exchange(exchanges, [post(url)])

    assert finished.kind is not None
    assert (finished.status, finished.body) == (0, b"")


def test_more_sockets_than_select_could_watch_are_served(receiver: Receiver) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    used = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    exchanges = Exchanges(Guard(allow_internal=True))

    finished = exchange(exchanges, [post(receiver.url) for _ in range(20)])

    assert {each.status for each in finished} == {200}
    exchanges.close()
    for fd in used:
        os.close(fd)


def test_the_signal_mask_is_left_as_it_was(exchanges: Exchanges, receiver: Receiver) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    exchange(exchanges, [post(receiver.on("localhost"))])

    assert signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG}) == before


def test_handles_are_bounded_whatever_endpoints_differ_in() -> None:
    """A handle is prepared for the options of an endpoint, and prepared anew for those of another one."""
    before = count_handles()
    exchanges = Exchanges(Guard(allow_internal=True), max_connections=4)
    with Receiver() as receiver:
        for number in range(50):
            exchange(exchanges, [post(receiver.url, timeout=PATIENCE + number)])

    assert count_handles() - before <= 4
    exchanges.close()


def count_handles() -> int:
    gc.collect()
    return sum(isinstance(each, pycurl.Curl) for each in gc.get_objects())


def test_each_receiver_keeps_its_connection_while_they_take_turns(exchanges: Exchanges) -> None:
    with Receiver() as one, Receiver() as other:
        for number in range(10):
            exchange(exchanges, [post((one if number % 2 else other).url, b"%d" % number)])

        assert [each.body for each in one.requests] == [b"1", b"3", b"5", b"7", b"9"]
        assert [each.body for each in other.requests] == [b"0", b"2", b"4", b"6", b"8"]
        assert (one.connections, other.connections) == (1, 1)


def test_options_of_a_request_do_not_reach_the_next_one(exchanges: Exchanges) -> None:
    options: list[dict[str, Any]] = [{}, {"method": "PUT"}, {"keep_body": 2}, {}]

    with Receiver(lambda request: Answer(body=b"answer")) as receiver:
        finished = [exchange(exchanges, [post(receiver.url, **each)])[0] for each in [*options, *options]]

    assert [each.method for each in receiver.requests] == ["POST", "PUT", "POST", "POST"] * 2
    assert [each.body for each in finished] == [b"answer", b"answer", b"an", b"answer"] * 2


def test_a_slow_receivers_answers_do_not_delay_anothers(exchanges: Exchanges, receiver: Receiver) -> None:
    others_are_done = threading.Event()

    def when_others_are_done(got: Received) -> Answer:
        others_are_done.wait(patience())
        return Answer()

    with Receiver(when_others_are_done) as slow:
        for number in range(10):
            exchanges.start(post(slow.url, tag=("slow", number)))
        for number in range(50):
            exchanges.start(post(receiver.url, tag=("fast", number)))
        order: list[Any] = []
        while exchanges.in_flight:
            order += [each.request.tag[0] for each in exchanges.step(0.1)]  # type: ignore[index]
            if len(order) == 50:
                others_are_done.set()

    assert order == ["fast"] * 50 + ["slow"] * 10


def test_a_changed_profile_takes_effect_with_its_first_request(exchanges: Exchanges, receiver: Receiver) -> None:
    profile = patient(receiver.url)
    exchange(exchanges, [Request(profile, [], b"1")])
    exchange(exchanges, [Request(profile._replace(method="PUT"), [], b"2")])

    assert [each.method for each in receiver.requests] == ["POST", "PUT"]
