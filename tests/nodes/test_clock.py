"""A node whose machine has a wrong clock: its requests carry the server's time, and doctor() names it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from support.node import Node, node_dsn, wait_for_nodes
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import Site

FINDINGS = """select finding, fix from ulak.doctor() where finding like 'the clock%'"""


def shifted(by: str) -> dict[str, str]:
    """An environment in which every program sees another time."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    return {"LD_PRELOAD": str(library), "FAKETIME": by, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture(params=["+1h", "-1h"])
def wrong_node(request: pytest.FixtureRequest, site: Site) -> Iterator[str]:
    """How its clock is wrong."""
    with Node(node_dsn(site.cluster, site.database), "--name", "late", environment=shifted(request.param)) as node:
        node.wait_until_says("delivering as")
        yield "ahead of" if request.param == "+1h" else "behind"


def test_a_node_whose_clock_is_wrong_signs_with_the_servers_time(
    site: Site, receiver: Receiver, wrong_node: str
) -> None:
    site.http("shop", receiver.url, signing_secret="a secret of this test, long enough")
    aws = {"type": "aws_sigv4", "access_key": "AKID", "secret_key": "x" * 40, "region": "eu-west-1", "service": "sqs"}
    site.http("aws", receiver.url, auth=aws)

    for endpoint in ("shop", "aws"):
        site.wait_for_status(site.send(endpoint), "completed")

    signed = next(each.headers["x-amz-date"] for each in receiver.requests if "x-amz-date" in each.headers)
    moments = [datetime.strptime(signed, "%Y%m%dT%H%M%S%z").timestamp()]
    moments += [float(each.headers["webhook-timestamp"]) for each in receiver.requests]
    # Far less than the hour that the node's clock is off.
    assert max(abs(time.time() - moment) for moment in moments) < 1800


def test_a_node_whose_clock_is_wrong_is_named(site: Site, receiver: Receiver, wrong_node: str) -> None:
    site.http("shop", receiver.url)

    (found,) = wait_until(lambda: site.rows(FINDINGS), "a finding")

    told = re.sub("1h 0m|59m 59s", "an hour", found["finding"])
    assert told == f"the clock of late is an hour {wrong_node} the server's"
    assert found["fix"] == "-- on late, as root: timedatectl set-ntp true"


def test_a_node_whose_clock_is_right_is_not_named(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    with Node(node_dsn(site.cluster, site.database)) as node:
        node.wait_until_says("delivering as")
        wait_for_nodes(site, 1)
        wait_until(lambda: site.value("select clock_ahead is not null from ulak.workers"), "a measurement")

        assert site.rows(FINDINGS) == []
