"""Every hostile receiver, all at once, while a healthy one is served beside them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import hostile
from support.deliveries import Exchanges
from support.hostile import Hostile
from support.receiver import Certificate, Listener, Receiver, make_certificate
from support.sessions import PATIENCE, wait_until
from support.site import LONGEST_TIMEOUT
from ulak.messages.delivery import EndpointConfig
from ulak.safety.address import Guard
from ulak.transports.http import endpoint, verdict
from ulak.transports.http.model import Endpoint, Finished, Outcome, Request

# Of requests that may end by it. Others have as much time as a busy machine may need.
TIMEOUT = 1.0
HEALTHY = 1000

# Case: what the verdict must start with; None is delivered.
EXPECTED = {
    "never_answers": "[RETRYABLE] timeout: ",
    "slow_headers": "[RETRYABLE] timeout: ",
    "slow_body": "[RETRYABLE] timeout: ",
    "closes_at_once": "[RETRYABLE] network: ",
    "closes_mid_body": "[RETRYABLE] network: ",
    "resets": "[RETRYABLE] network: ",
    "invalid_status_line": "[RETRYABLE] network: ",
    "bad_chunking": "[RETRYABLE] network: ",
    "endless_headers": "[RETRYABLE] ",
    "endless_small_headers": "[RETRYABLE] ",
    "endless_folded_header": "[RETRYABLE] ",
    "endless_interim_answers": "[RETRYABLE] ",
    "huge_body": None,
    "gzip_bomb": None,
    "gzip_bomb_in_transfer": None,
    "redirect_to_metadata": "[PERMANENT] HTTP 302",
    "gone": "[DISABLE] HTTP 410",
    "empty_200": None,
    "no_length_200": None,
    "tls_self_signed": "[RETRYABLE] tls: ",
    "tls_expired": "[RETRYABLE] tls: ",
    "tls_wrong_host": "[RETRYABLE] tls: ",
    "tls_on_a_plain_port": "[RETRYABLE] tls: ",
    "tls_never_answers": "[RETRYABLE] timeout: ",
    "unresolvable": "[RETRYABLE] resolve: ",
    "refused": "[RETRYABLE] connect: ",
    "blocked_address": "[PERMANENT] blocked: address ",
}
# Newer versions of libcurl refuse an encoding that they didn't ask for.
IF_REFUSED = {"gzip_bomb_in_transfer": "[RETRYABLE] network: Unsolicited Transfer-Encoding"}
HANGS = [case for case, expected in EXPECTED.items() if expected == "[RETRYABLE] timeout: "]
MAY_TIME_OUT = {case for case, expected in EXPECTED.items() if expected == "[RETRYABLE] "} | {*HANGS}


@dataclass
class Result:
    finished: Finished
    outcome: Outcome


@dataclass(repr=False)
class Run:
    results: dict[str, Result]
    servers: dict[str, Listener]
    # Requests to the receivers of HANGS that had plenty of time, and ended nevertheless before all healthy messages had arrived.
    let_go: list[str]
    kilobytes_grown: int


class Plain(Listener):
    """Answers whatever comes, in plain text."""

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


class Silent(Listener):
    """Accepts connections and never sends anything, not even for TLS."""

    def serve(self, connection: socket.socket, number: int) -> None:
        self.wait()


def _servers(folder: Path, certificate: Certificate) -> dict[str, Listener]:
    expired = make_certificate(folder, days=(-30, -1), file="expired")
    elsewhere = make_certificate(folder, names=("elsewhere.example",), file="elsewhere")
    location = b"location: http://169.254.169.254/latest/meta-data/\r\n"
    servers: dict[str, Listener] = {
        each.__name__: Hostile(each) for each in (*hostile.BEHAVIOURS, hostile.gzip_bomb_in_transfer)
    }
    servers |= {
        "redirect_to_metadata": Hostile(
            hostile.answers(b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n" + location + b"\r\n")
        ),
        "gone": Hostile(hostile.answers(b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n")),
        "empty_200": Hostile(hostile.answers(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")),
        "no_length_200": Hostile(hostile.answers(b"HTTP/1.1 200 OK\r\n\r\n")),
        "tls_self_signed": Receiver(certificate=certificate),
        "tls_expired": Receiver(certificate=expired),
        "tls_wrong_host": Receiver(certificate=elsewhere),
        "tls_on_a_plain_port": Plain(),
        "tls_never_answers": Silent(),
        "blocked_address": Receiver(host="0.0.0.0"),
    }
    return servers


def _configs(servers: dict[str, Listener], folder: Path) -> dict[str, dict[str, object]]:
    configs: dict[str, dict[str, object]] = {name: {"url": server.url} for name, server in servers.items()}
    for name, trusted in (("tls_expired", "expired"), ("tls_wrong_host", "elsewhere")):
        configs[name]["tls_ca_bundle"] = str(folder / f"{trusted}.crt")
    for name in ("tls_on_a_plain_port", "tls_never_answers"):
        configs[name]["url"] = servers[name].url.replace("http:", "https:")
    configs["unresolvable"] = {"url": "http://nothing.invalid/"}
    configs["refused"] = {"url": "http://127.0.0.1:1/"}
    configs["blocked_address"]["url"] = servers["blocked_address"].on("127.0.0.2")
    return configs


def _endpoint(number: int, name: str, config: dict[str, object], timeout: float) -> Endpoint:
    given = {"connect_timeout": PATIENCE, "timeout": timeout, **config}
    return endpoint.parse(EndpointConfig(number, name, 1, given))


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.bomb()
    servers = _servers(folder, certificate)
    with Receiver() as healthy:
        yield _run(_configs(servers, folder), servers, healthy)
    for server in servers.values():
        server.close()


def _run(configs: dict[str, dict[str, object]], servers: dict[str, Listener], receiver: Receiver) -> Run:
    """All at once, until each hostile case is judged and all healthy messages have arrived."""
    # Loopback is where the tests live; one address of it stays forbidden.
    exchanges = Exchanges(Guard(allowed=["127.0.0.1/32", "::1/128"]))
    memory = _memory()
    endpoints = {
        case: _endpoint(number, case, config, TIMEOUT if case in MAY_TIME_OUT else PATIENCE)
        for number, (case, config) in enumerate(configs.items(), 1)
    }
    # By another name: over TLS, a request waits for a connection to the same host that is being opened, whatever its own time-out.
    urls = {case: endpoints[case].profile.url.replace("127.0.0.1", "localhost") for case in HANGS}
    held = {f"{case}, held": _endpoint(0, case, {"url": url}, LONGEST_TIMEOUT) for case, url in urls.items()}
    healthy = _endpoint(0, "healthy", {"url": receiver.url}, PATIENCE)
    for tag, target in {**held, **endpoints}.items():
        exchanges.start(Request(target.profile, [], b"{}", tag))
    results: dict[str, Result] = {}
    let_go: list[str] = []
    sent = arrived = 0

    def is_done() -> bool:
        nonlocal sent, arrived
        while sent < HEALTHY and sent - arrived < 4:
            exchanges.start(Request(healthy.profile, [], b"{}"))
            sent += 1
        for finished in exchanges.step(0.1):
            case = finished.request.tag
            if case is None:
                assert finished.status == 200
                arrived += 1
            elif case in held:
                let_go.append(str(case))
            else:
                assert isinstance(case, str) and case not in results
                results[case] = Result(finished, verdict.judge(endpoints[case], finished, time.time()))
        are_held = all(servers[case].connections == 2 for case in HANGS)
        return are_held and len(results) == len(endpoints) and arrived == HEALTHY

    wait_until(is_done, "the end of all that isn't held", interval=0)
    grown = _memory() - memory
    exchanges.close()
    return Run(results, servers, let_go, grown)


@pytest.mark.parametrize("case", EXPECTED)
def test_a_hostile_receiver_is_classified_as_documented(run: Run, case: str) -> None:
    error = run.results[case].outcome.error
    expected = EXPECTED[case]
    if error is not None and expected is None:
        expected = IF_REFUSED.get(case)

    if expected is None:
        assert error is None
    else:
        assert error is not None
        assert error.startswith(expected)


def test_messages_to_a_healthy_receiver_arrive_while_others_hang(run: Run) -> None:
    """The run has ended because they had arrived."""
    assert run.let_go == []


@pytest.mark.parametrize("case", ["huge_body", "gzip_bomb", "gzip_bomb_in_transfer"])
def test_a_huge_answer_is_judged_by_its_status(run: Run, case: str) -> None:
    finished = run.results[case].finished

    assert finished.status == 200
    assert len(finished.body) <= 512


def test_a_huge_answer_is_left_unread(run: Run) -> None:
    server = run.servers["huge_body"]

    # What the kernel's buffers took counts too.
    assert isinstance(server, Hostile)
    assert server.sent < 20_000_000


def test_a_compressed_answer_is_not_unpacked(run: Run) -> None:
    assert run.results["gzip_bomb"].finished.body.startswith(b"\x1f\x8b")


def test_a_huge_answer_costs_no_memory(run: Run) -> None:
    assert run.kilobytes_grown < 100_000


def test_a_blocked_address_and_its_rule_are_named(run: Run) -> None:
    error = run.results["blocked_address"].outcome.error

    assert error is not None
    assert error.startswith("[PERMANENT] blocked: address 127.0.0.2 is blocked (loopback, 127.0.0.0/8); to allow it: ")
    assert run.servers["blocked_address"].connections == 0


@pytest.mark.parametrize("case", ["tls_self_signed", "tls_expired", "tls_wrong_host"])
def test_nothing_is_sent_over_an_untrusted_connection(run: Run, case: str) -> None:
    server = run.servers[case]

    assert isinstance(server, Receiver)
    assert server.requests == []
