"""What docker/OPERATIONS.md shows comes out: the story of its outage is played, and each statement prints what the page says it did."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from support.cluster import PROJECT
from support.receiver import Receiver
from support.runbook import DOCUMENT, Played, shape, shown
from support.site import Site


@pytest.mark.timeout(300)
def test_every_output_of_the_runbook_is_one_that_comes_out(outage: Future[Played]) -> None:
    """But for times, durations, numbers and identifiers."""
    played = outage.result()

    assert played.is_over
    for each, output in zip(shown(DOCUMENT.read_text()), played.outputs, strict=True):
        # pg_cron 1.5 and newer get other jobs.
        if not (played.has_other_jobs and "ulak.start()" in each.statement):
            assert (each.statement, shape(output)) == (each.statement, shape(each.output))


def test_what_readme_shows_of_a_message_comes_out(site: Site, receiver: Receiver) -> None:
    (page,) = shown((PROJECT / "README.md").read_text())
    site.http("orders", receiver.url)
    site.start()
    id = site.send("orders")
    site.wait_for_status(id, "completed")

    rows = site.db.execute("select * from ulak.explain(%s)", [id]).fetchall()

    printed = [f"{'' if at is None else at} | {what}" for at, what in rows]
    assert page.statement == "select * from ulak.explain(1);"
    # The page's sender is its shop.
    assert shape("\n".join(printed)) == shape(page.output.replace("sent by shop", f"sent by {site.db.info.user}"))
