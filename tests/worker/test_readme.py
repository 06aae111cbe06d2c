"""What README and the guide show runs: their SQL in the order of the page, README's first message, and the guide's receivers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.cluster import PROJECT, Cluster
from support.kafka import Kafka
from support.mosquitto import Mosquitto, Subscriber
from support.nats import Nats
from support.ports import is_taken, start_on_free_port
from support.programs import start_program
from support.rabbitmq import PASSWORD, USER, RabbitMQ
from support.receiver import Receiver
from support.redis import Redis
from support.sessions import wait_until
from support.site import Site
from support.webhooks import verifies

README = (PROJECT / "README.md").read_text()
GUIDE = (PROJECT / "sql" / "GUIDE.md").read_text()


def shown(language: str, document: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


def program(language: str, name: str) -> str:
    """The one of the guide that says its file's name in its first line."""
    (found,) = [each for each in shown(language, GUIDE) if name in each.split("\n")[0]]
    return found


def play(cluster: Cluster, database: str, script: str) -> None:
    """An error is one that the page shows, in its words. The rows behind --> are the last that came out until there."""
    rows_shown = re.compile(r"(?:^--> .*\n)+", re.MULTILINE)
    expected = [[row.removeprefix("--> ") for row in rows.splitlines()] for rows in rows_shown.findall(script)]

    done = subprocess.run(
        [cluster.bin / "psql", "-X", "-q", "-A", "-t", "-F", " | ", "-d", cluster.dsn(database)],
        input=rows_shown.sub(r"\\echo -->\n", script),
        text=True,
        capture_output=True,
        check=False,
    )

    assert re.findall(r"^ERROR: .*", done.stderr, re.MULTILINE) == re.findall(r"^-- (ERROR: .*)", script, re.MULTILINE)
    printed = [[line.rstrip() for line in part.splitlines()] for part in done.stdout.split("-->\n")[:-1]]
    assert [part[-len(rows) :] for part, rows in zip(printed, expected, strict=True)] == expected


def drop_roles(cluster: Cluster, document: str) -> None:
    for role in re.findall(r"^create role (\w+)", document, re.MULTILINE):
        cluster.execute(f"drop role if exists {role}")


@pytest.fixture
def readers_database(cluster: Cluster, template: str) -> Iterator[str]:
    with cluster.database("reader", template) as name:
        yield name
    drop_roles(cluster, README)


def test_every_statement_of_readme_does_what_the_page_says(cluster: Cluster, readers_database: str) -> None:
    script = "\n".join(shown("sql", README))

    assert "ulak.send(" in script
    play(cluster, readers_database, script)


def test_what_readme_sends_after_all_its_statements_is_signed(
    cluster: Cluster, readers_database: str, receiver: Receiver
) -> None:
    """With the secret that rotate_secret() showed."""
    play(cluster, readers_database, "\n".join(shown("sql", README)).replace("http://127.0.0.1:8080", receiver.origin))
    with contextlib.closing(Site(cluster, readers_database)) as site:
        secret = site.value("select value from ulak_private.secrets where name like 'ulak/endpoint/%'")
        id = site.send("orders", {"order": 43})
        site.start()
        site.wait_for_status(id, "completed")

    assert [verifies(secret, request) for request in receiver.requests if b"43" in request.body] == [True]


def test_every_statement_of_the_guide_does_what_the_page_says(
    cluster: Cluster, cron_database: str, receiver: Receiver
) -> None:
    """In pg_cron's database, for what it schedules; its worker reaches a receiver at the port of this run."""
    script = "\n".join(shown("sql", GUIDE)).replace("http://127.0.0.1:8080", receiver.origin)
    logged_before = len(cluster.log.read_bytes())
    site = Site(cluster, cron_database)
    try:
        site.start()
        play(cluster, cron_database, script)
    finally:
        site.end()
        drop_roles(cluster, GUIDE)

    (line,) = re.findall(r"^    (LOG: .*)", GUIDE, re.MULTILINE)
    logged = cluster.log.read_bytes()[logged_before:].decode(errors="replace")
    assert re.search(re.escape(line).replace(re.escape("..."), '[^"]+'), logged)
    assert not re.search(r"^    (=>|select|call) ", GUIDE, re.MULTILINE), "SQL that isn't run"


def test_the_dry_run_of_the_guide_shows_changes_and_fails_for_a_document_that_is_refused(
    cluster: Cluster, database: str, tmp_path: Path
) -> None:
    (command,) = [each for each in shown("sh", GUIDE) if "ulak.json" in each]
    variables = {**os.environ, "PGHOST": cluster.host, "PGPORT": str(cluster.port), "PGDATABASE": database}

    def run(document: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "ulak.json").write_text(document)
        options: dict[str, Any] = {"cwd": tmp_path, "env": variables, "text": True, "capture_output": True}
        return subprocess.run(["bash", "-e", "-c", command], check=False, **options)

    good = run("""{"endpoints": {"it's": {"protocol": "pull"}}}""")
    bad = run('{"endpoints": {"shop": {"protocol": "pul"}}}')

    assert (good.returncode, good.stderr) == (0, "")
    assert re.search(r"endpoints \| it's +\| create", good.stdout)
    assert bad.returncode != 0
    assert "endpoints shop: unknown protocol 'pul'" in bad.stderr


def test_the_start_on_debian_ends_with_a_delivered_message(cluster: Cluster, cron_database: str) -> None:
    """Its last command, in a database with a worker, which the commands before it are for (tests/packages.sh runs those)."""
    (commands,) = [each for each in shown("sh", README) if "ulak-setup" in each]
    (script,) = re.findall(r"<<'SQL'\n(.*?)\nSQL\n", commands, re.DOTALL)
    statements = [each for each in script.splitlines() if each]
    site = Site(cluster, cron_database)
    try:
        site.start()
        *others, last = statements
        printed = cluster.psql(cron_database, last, *(part for each in others for part in ("-c", each)))
    finally:
        site.end()

    assert len(statements) == 3
    assert printed.split()[-1] == "completed"
    assert statements[-1].endswith("-- completed")


def test_the_start_with_docker_names_services_and_an_endpoint_that_compose_has() -> None:
    (commands,) = [each for each in shown("sh", README) if "docker compose" in each]
    services = re.findall(r"^  (\w+):$", (PROJECT / "docker/compose.yaml").read_text(), re.MULTILINE)

    assert len(commands.splitlines()) == 5
    named = re.findall(r"(?:logs(?: --follow)?|exec) (\w+)", commands)
    assert named == ["hello", "database", "receiver"]
    assert set(named) <= set(services)
    (endpoint,) = re.findall(r"ulak\.send\('(\w+)'", commands)
    assert f"ulak.create_endpoint('{endpoint}'" in (PROJECT / "docker/demo/demo.sql").read_text()
    (said,) = re.findall(r"# says: (.*)", commands)
    assert said.replace("1", "$id") in (PROJECT / "docker/demo/hello.sh").read_text()


RECEIVERS = {"receiver.py": ("python", [sys.executable]), "receiver.js": ("js", ["node"])}


@pytest.mark.parametrize("name", RECEIVERS)
def test_a_receiver_of_the_guide_takes_each_message_once_and_no_forgery(site: Site, tmp_path: Path, name: str) -> None:
    language, command = RECEIVERS[name]
    (tmp_path / name).write_text(program(language, name))
    takes_each_message_once_and_no_forgery(site, tmp_path, lambda port: [*command, str(tmp_path / name)])


def takes_each_message_once_and_no_forgery(site: Site, tmp_path: Path, command: Callable[[int], list[str]]) -> None:
    """The command is told its port, and finds it in PORT, too."""
    site.http("orders", "http://127.0.0.1/hooks")
    secret = str(site.call("rotate_secret", "orders"))
    site.http("forger", "http://127.0.0.1/hooks", signing_secret="whsec_" + "A" * 44)
    log = tmp_path / "printed"

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        environment = {**os.environ, "WEBHOOK_SECRET": secret, "PORT": str(port)}
        return start_program(command(port), log, lambda: is_taken(port), cwd=tmp_path, env=environment), port

    process, port = start_on_free_port(start)
    move = "update ulak.endpoints set config = config || jsonb_build_object('url', %s::text)"
    site.db.execute(move, [f"http://127.0.0.1:{port}/hooks"])
    try:
        site.start()
        first = site.wait_for_status(site.send("orders", {"order": 42}), "completed")
        site.wait_for_status(site.call("replay_message", first["id"]), "completed")
        # Both secrets sign while the grace lasts; the receiver knows the old one.
        site.call("rotate_secret", "orders", grace="1 hour")
        site.wait_for_status(site.send("orders", {"order": 43}), "completed")
        forged = site.wait_for_status(site.send("forger", {"order": 44}), "failed")

        def printed() -> list[str]:
            return [line for line in log.read_text().splitlines() if line.startswith("{")]

        wait_until(lambda: len(printed()) >= 2, message="what was received")
        assert printed() == ['{"order": 42}', '{"order": 43}']
        assert "HTTP 401" in forged["last_error"]
    finally:
        process.terminate()
        process.wait()


def test_the_endpoints_of_the_guide_deliver_to_brokers(
    site: Site, kafka: Kafka, redis_server: Redis, mosquitto: Mosquitto, rabbitmq: RabbitMQ, nats: Nats
) -> None:
    """As printed, except for the broker's address and login."""
    place = {"host": "127.0.0.1", "password": None}
    here: dict[str, dict[str, Any]] = {
        # Others have a topic of that name.
        "kafka": {"broker": kafka.broker, "options": None, "topic": kafka.create_topic("orders-of-the-guide")},
        "redis": {**place, "port": redis_server.port},
        "amqp": rabbitmq.config(),
        "mqtt": {"broker": "127.0.0.1", "port": mosquitto.port},
        "nats": {"url": nats.url, "token": None},
    }
    statement = r"create_endpoint\('([a-z-]+)', '(kafka|redis|amqp|mqtt|nats)', '(\{.*?\})'\);"
    # The first of each: a newcomer takes these, and sends without metadata.
    examples = reversed(re.findall(statement, GUIDE, re.DOTALL))
    found = {protocol: (name, json.loads(config)) for name, protocol, config in examples}
    for protocol, (name, config) in found.items():
        given = {key: value for key, value in {**config, **here[protocol]}.items() if value is not None}
        site.endpoint(name, given, None, protocol)
    rabbitmq.declare("orders")
    nats.create_stream("ORDERS", "orders.>")
    with Subscriber(mosquitto, "shop/#") as subscriber:
        site.start()
        for name, _ in found.values():
            site.wait_for_status(site.send(name, {"order": 42}), "completed")

        arrived = {
            "kafka": [each.value for each in kafka.read("orders-of-the-guide", 1)],
            "redis": [each["payload"].encode() for each in redis_server.entries("orders")],
            "amqp": [each.body for each in rabbitmq.take("orders") if each.routing_key == "orders.created"],
            "mqtt": [each.payload for each in subscriber.wait_for(1) if each.topic == "shop/orders"],
            "nats": [each.payload for each in nats.stored("ORDERS") if each.subject == "orders.created"],
        }
    rabbitmq.delete("orders")
    redis_server.reset()
    nats.delete_stream("ORDERS")
    assert set(found) == set(here)
    assert {protocol: [json.loads(each) for each in bodies] for protocol, bodies in arrived.items()} == {
        protocol: [{"order": 42}] for protocol in here
    }


def consumes_each_message_once(site: Site, tmp_path: Path, protocol: str, address: str) -> None:
    printed = tmp_path / "printed"
    script = tmp_path / "consumer.py"
    script.write_text(program("python", "consumer.py"))
    with printed.open("w") as output:
        process = subprocess.Popen([sys.executable, str(script), protocol, address], cwd=tmp_path, stdout=output)
    try:
        site.start()
        # What comes before it has subscribed isn't for it.
        wait_until(lambda: deliver_one(site) and printed.read_text(), "a consumer", interval=0.2)
        first = site.wait_for_status(site.send("orders", {"order": 42}), "completed")
        site.wait_for_status(site.call("replay_message", first["id"]), "completed")
        stand_still(process)
        site.wait_for_status(site.send("orders", {"order": 43}), "completed")

        wait_until(lambda: '{"order": 43}' in printed.read_text(), message="what was received")
        assert printed.read_text().split("\n").count('{"order": 42}') == 1
    finally:
        process.terminate()
        process.wait()


def stand_still(process: subprocess.Popen[bytes]) -> None:
    """For longer than a consumer waits for messages, as on a busy machine."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    process.send_signal(signal.SIGCONT)


def deliver_one(site: Site) -> bool:
    return bool(site.wait_for_status(site.send("orders", {"order": 1}), "completed"))


def test_the_consumer_of_a_stream_takes_each_message_once(site: Site, tmp_path: Path, redis_server: Redis) -> None:
    config = {"host": "127.0.0.1", "port": redis_server.port, "stream_key": "orders"}
    site.endpoint("orders", config, None, "redis")

    consumes_each_message_once(site, tmp_path, "redis", f"redis://127.0.0.1:{redis_server.port}")

    redis_server.reset()


def test_the_consumer_of_a_topic_takes_each_message_once(site: Site, tmp_path: Path, mosquitto: Mosquitto) -> None:
    config = {"broker": "127.0.0.1", "port": mosquitto.port, "topic": "orders/paid"}
    site.endpoint("orders", config, None, "mqtt")

    consumes_each_message_once(site, tmp_path, "mqtt", f"127.0.0.1:{mosquitto.port}")


def test_the_consumer_of_a_log_takes_each_message_once(site: Site, tmp_path: Path, kafka: Kafka) -> None:
    site.endpoint("orders", {"broker": kafka.broker, "topic": kafka.create_topic("orders")}, None, "kafka")

    consumes_each_message_once(site, tmp_path, "kafka", kafka.broker)


def test_the_consumer_of_a_queue_takes_each_message_once(site: Site, tmp_path: Path, rabbitmq: RabbitMQ) -> None:
    options = {"exchange": "orders", "exchange_type": "topic", "routing_key": "shop.paid"}
    # Until the consumer has bound its queue, no queue takes a message.
    policy = {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 100}
    site.endpoint("orders", rabbitmq.config(**options, circuit_breaker={"threshold": 1000}), policy, "amqp")

    address = f"amqp://{USER}:{quote(PASSWORD)}@127.0.0.1:{rabbitmq.port}/%2F"
    consumes_each_message_once(site, tmp_path, "amqp", address)

    rabbitmq.delete("orders")


def test_the_consumer_of_a_subject_takes_each_message_once(site: Site, tmp_path: Path, nats: Nats) -> None:
    # Until the consumer has made its stream, no stream takes a message.
    policy = {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 100}
    config = {"url": nats.url, "subject": "orders.paid", "circuit_breaker": {"threshold": 1000}}
    site.endpoint("orders", config, policy, "nats")

    consumes_each_message_once(site, tmp_path, "nats", nats.url)

    nats.delete_stream("ORDERS")
