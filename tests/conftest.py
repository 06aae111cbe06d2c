"""One cluster per process, one database per test, receivers on loopback."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import NO_PG_CRON, TEMPLATE, Cluster, Connect, remove_abandoned
from support.janitor import Janitor
from support.kafka import Kafka
from support.machine import choose_examples
from support.mosquitto import Mosquitto
from support.nats import Nats
from support.plain import create_cluster, is_plain, reason_to_skip
from support.processes import Scheduling, is_one_of_several, waits_for_the_clock
from support.rabbitmq import RabbitMQ
from support.receiver import Certificate, Receiver, make_certificate
from support.redis import Redis
from support.scenarios import write_table
from support.site import Site

pytest_plugins = ["support.outcomes"]
choose_examples()

_numbers = itertools.count(1)

CLIENTS = Path(__file__).parent / "clients"
MAJORS = Path(__file__).resolve().parent / "majors"
# Folders that break most often come first. The workers come before the longest part, so that pg_cron's minutes pass during it.
ORDER = ("conventions", "unit", "security", "upgrade", "plain", "chaos", "concurrency", "worker", "nodes", "db")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In that order. Tests that wait for the clock come last in a single process, and first if others run meanwhile; long tests come before
    short ones, so that all processes are busy until the end."""
    waiting = -1 if is_one_of_several(config) else len(ORDER)

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.parent.name
        if waits_for_the_clock(item):
            # A test that asks for the outage waits for its end.
            return waiting, "outage" in getattr(item, "fixturenames", ())
        return ORDER.index(folder) if folder in ORDER else len(ORDER), not item.path.stem.endswith("_machine")

    if seed := os.environ.get("ULAK_SEED"):
        shuffle(items, random.Random(int(seed)))
    else:
        items.sort(key=place)
    if is_plain():
        for item in items:
            if reason := reason_to_skip(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


def shuffle(items: list[pytest.Item], order: random.Random) -> None:
    """Files, and the tests in each: they share what a module has made."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    order.shuffle(groups)
    for group in groups:
        order.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Here, because with several processes the one that prints it runs no test."""
    write_table(terminalreporter)
    asked_for = [(config.invocation_params.dir / each.partition("::")[0]).resolve() for each in config.args]
    if "ULAK_OLDER" not in os.environ and any(MAJORS.is_relative_to(path) for path in asked_for):
        terminalreporter.write_line("tests/majors need two versions of PostgreSQL: make test-debian13 runs them")
    if "ULAK_CLIENTS" not in os.environ and any(CLIENTS.is_relative_to(path) for path in asked_for):
        terminalreporter.write_line("tests/clients need drivers of six languages: make test-clients runs them")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    remove_abandoned()
    cluster = create_cluster(in_memory=True)
    yield cluster
    cluster.remove()


@pytest.fixture(scope="session")
def template(cluster: Cluster) -> str:
    """A database with the extension and nothing else, to be cloned."""
    Janitor(cluster, TEMPLATE, as_template=True).init()
    cluster.install(TEMPLATE)
    return TEMPLATE


@pytest.fixture
def database(cluster: Cluster, template: str) -> Iterator[str]:
    """A clone for this test."""
    with cluster.database(f"test_{next(_numbers)}", template) as name:
        yield name


@pytest.fixture(scope="module")
def module_database(request: pytest.FixtureRequest, cluster: Cluster, template: str) -> Iterator[str]:
    """A clone for the tests of a module."""
    with cluster.database(request.path.stem, template) as name:
        yield name


@pytest.fixture(scope="module")
def module_session(cluster: Cluster, module_database: str) -> Iterator[psycopg.Connection[Any]]:
    """A superuser's session in it, for tests that need no second one."""
    with cluster.connect(module_database) as connection:
        yield connection


@pytest.fixture
def empty_database(cluster: Cluster) -> Iterator[str]:
    """A database without the extension."""
    with cluster.database(f"test_{next(_numbers)}") as name:
        yield name


@pytest.fixture
def connect(cluster: Cluster, database: str) -> Iterator[Connect]:
    """connect(role=None, autocommit=True): a session in this test's database, closed at its end."""
    opened: list[psycopg.Connection[Any]] = []

    def open_session(role: str | None = None, autocommit: bool = True, **options: Any) -> psycopg.Connection[Any]:
        opened.append(cluster.connect(database, role, autocommit, **options))
        return opened[-1]

    yield open_session
    for connection in opened:
        connection.close()


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection[Any]:
    """A superuser's session in this test's database."""
    return connect()


@pytest.fixture
def cron_database(cluster: Cluster) -> Iterator[str]:
    """The cluster's database of pg_cron, with a fresh ulak in it and no job."""
    name = cluster.home_of_pg_cron()
    if name is None:
        pytest.skip(NO_PG_CRON)
    cluster.install(name)
    cluster.execute("create extension if not exists pg_cron", name)
    yield name
    cluster.execute("select cron.unschedule(jobid) from cron.job", name)
    # Jobs that still run hold locks; pg_cron's launcher is no client backend and stays.
    cluster.execute(
        """
        select pg_terminate_backend(pid, 5000) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
        """,
        name,
    )
    cluster.execute("delete from cron.job_run_details", name)
    cluster.uninstall(name)


@pytest.fixture(scope="session")
def site_database(cluster: Cluster, template: str) -> Iterator[str]:
    with cluster.database("site", template) as name:
        yield name


@pytest.fixture
def site(cluster: Cluster, site_database: str) -> Iterator[Site]:
    """With workers. In a database that the tests share: each leaves it empty."""
    with closing(Site(cluster, site_database)) as site:
        yield site


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """For localhost and 127.0.0.1."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One for all tests, each with exchanges of its own. Its certificate is for localhost and 127.0.0.1."""
    with RabbitMQ(make_certificate(tmp_path_factory.mktemp("rabbitmq"))) as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """Shared by all tests that leave it as it was: reset() empties it."""
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """Shared by all tests that leave it running. Acknowledgements go out at once: mosquitto's default lets each second one wait 40 ms for the
    kernel's delayed acknowledgement of the first."""
    with Mosquitto(tmp_path_factory.mktemp("mosquitto"), "set_tcp_nodelay true") as broker:
        yield broker


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    """Shared by all tests that leave it running; each has streams of its own."""
    with Nats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_cluster() -> Iterator[Kafka]:
    with Kafka() as kafka:
        yield kafka


@pytest.fixture
def kafka(kafka_cluster: Kafka) -> Iterator[Kafka]:
    """Shared by all tests: each has topics of its own, and leaves the cluster running and healthy."""
    yield kafka_cluster
    kafka_cluster.mend()
