"""What was sent is stored once, apart from where its deliveries stand."""

from __future__ import annotations

from support.receiver import Receiver
from support.site import Site


def test_a_message_whose_body_is_gone_is_the_only_one_that_fails(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url, policy={"max_retries": 0})
    lost, *others = site.send_many(3)
    site.db.execute("delete from ulak_private.events where id = %s", [lost])

    site.start()
    for id in others:
        site.wait_for_status(id, "completed")

    assert "its body is gone" in site.wait_for_status(lost, "failed")["last_error"]
    site.wait_for_status(site.send(), "completed")
