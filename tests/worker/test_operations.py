"""What docker/OPERATIONS.md shows comes out: the story of its outage is played, and each statement prints what the page says it did."""

from __future__ import annotations

import pytest
from support.cluster import PROJECT
from support.receiver import Receiver
from support.runbook import DOCUMENT, Runbook, shape, shown
from support.site import Site


@pytest.mark.timeout(300)
def test_every_output_of_the_runbook_is_one_that_comes_out() -> None:
    """But for times, durations, numbers and identifiers."""
    page = list(shown(DOCUMENT.read_text()))

    with Runbook(is_hurried=True) as runbook:
        printed = [(each.statement, runbook.run(each.statement)) for each in page]
        # pg_cron 1.5 and newer get other jobs.
        is_other = not runbook.cluster.cron_waits_for_the_longest_job()

    assert runbook.is_over()
    for each, (statement, output) in zip(page, printed, strict=True):
        if not (is_other and "ulak.start()" in statement):
            assert (statement, shape(output)) == (statement, shape(each.output))


def test_what_readme_shows_of_a_message_comes_out(site: Site, receiver: Receiver) -> None:
    (page,) = shown((PROJECT / "README.md").read_text())
    site.http("orders", receiver.url)
    site.start()
    id = site.send("orders")
    site.wait_for_status(id, "completed")

    rows = site.db.execute("select * from ulak.explain(%s)", [id]).fetchall()

    printed = [f"{'' if at is None else at} | {what}" for at, what in rows]
    assert page.statement == "select * from ulak.explain(1);"
    assert shape("\n".join(printed)) == shape(page.output)
