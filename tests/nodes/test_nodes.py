"""A node's life: it fetches its code from the database, delivers, and leaves when it should."""

from __future__ import annotations

from support.receiver import Receiver
from support.site import Site

from tests.nodes.conftest import StartNode


def test_a_node_delivers_and_is_seen_with_its_host(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    site.http("down", "http://127.0.0.1:9/", policy={"max_retries": 0})
    node = start_node("machine-7")
    for n in range(20):
        site.send("shop", {"n": n})
    site.send("down")

    try:
        receiver.wait_for(20)
    finally:
        print(node.lines())
    site.wait_until_settled()
    print(site.rows("select * from ulak.workers"))
