"""Random lives of messages while months are made and dropped: whatever can still be delivered, redriven or replayed has its body."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.machine import play
from support.queue import DB, Queue
from support.sessions import wait_until

MONTHS_KEPT = 2
DAYS_OF_LETTERS = 100

BODIES = """
    select message_id::text, payload, headers ->> 'x-n', metadata ->> 'n' from ulak.messages
    union all
    select message_id::text, payload, headers ->> 'x-n', metadata ->> 'n' from ulak.dlq
"""
# Months of events that retention has left though the archive's month is gone.
LEFT = """
    select p.name, ulak_private.needs_events(p.month) from ulak_private.month_partitions p
    where p.parent = 'ulak_private.events'::regclass
        and not exists (
            select from ulak_private.month_partitions a where a.parent = 'ulak_private.archived'::regclass and a.month = p.month
        )
"""
# A letter that was redriven isn't replayed as well.
REPLAYABLE = """
    select id from ulak.archive a
    where not exists (select from ulak.dlq d where d.original_message_id = a.id and d.status <> 'failed')
    order by id
"""

which = st.integers(0, 99)


class Machine(RuleBasedStateMachine):
    queue: Queue
    steps = 0

    @initialize()
    def start(self) -> None:
        self.queue.empty()
        # A long game has a hundred months. Compiling a look at all of them takes longer than the look.
        self.queue.db.execute("set jit = off")
        self.queue.db.execute("delete from ulak.subscriptions; delete from ulak.event_types where name = 'sold'")
        self.queue.db.execute(f"select ulak.configure('dlq_retention_days', '{DAYS_OF_LETTERS}')")
        for name in ("shop", "bank"):
            self.queue.endpoint(name, policy={"max_retries": 0})
        self.queue.db.execute("select ulak.create_event_type('sold')")
        self.queue.db.execute("select ulak.subscribe('sold', name) from unnest('{shop,bank}'::text[]) name")
        self.months = 0
        self.sent = 0
        self.bodies: dict[str, int] = {}
        self.maintain()

    @property
    def now(self) -> datetime:
        """Months after the real present, in which send() has to live."""
        now: datetime = self.queue.value("select now() + make_interval(months => %s)", self.months)
        return now

    def check(self) -> None:
        Machine.steps += 1
        for message_id, payload, header, note in self.queue.db.execute(BODIES):
            assert payload is not None, message_id
            number = self.bodies.setdefault(message_id, payload["n"])
            assert (payload["n"], header, note) == (number, str(number), str(number))

    def pick(self, query: str, number: int, *parameters: Any) -> Any:
        found = self.queue.column(query, *parameters)
        return found[number % len(found)] if found else None

    @rule(publishes=st.booleans())
    def send(self, publishes: bool) -> None:
        self.sent += 1
        options = f'p_headers => \'{{"x-n": "{self.sent}"}}\', p_metadata => \'{{"n": "{self.sent}"}}\''
        call = "publish('sold'" if publishes else "send('shop'"
        self.queue.db.execute(f"select ulak.{call}, '{{\"n\": {self.sent}}}', {options})")  # type: ignore[arg-type]
        self.check()

    @rule(fails=st.booleans(), which=which)
    def settle(self, fails: bool, which: int) -> None:
        claims = self.queue.db.execute(
            "select id, attempt from ulak.claim('w', 1, %s, p_now => %s)", [("shop", "bank")[which % 2], self.now]
        ).fetchall()
        for id, attempt in claims:
            if fails:
                self.queue.db.execute("select ulak.fail(%s, 'w', %s, 'no', p_now => %s)", [id, attempt, self.now])
            else:
                self.queue.db.execute("select ulak.complete(%s, 'w', %s, p_now => %s)", [id, attempt, self.now])
        self.check()

    @rule(which=which)
    def cancel(self, which: int) -> None:
        if (id := self.pick("select id from ulak.queue where status = 'pending' order by id", which)) is not None:
            self.queue.db.execute("select ulak.cancel(%s, %s)", [id, self.now])
        self.check()

    @rule(which=which)
    def redrive(self, which: int) -> None:
        if (id := self.pick("select id from ulak.dlq where status = 'failed' order by id", which)) is not None:
            self.queue.db.execute("select ulak.redrive_message(%s, p_now => %s)", [id, self.now])
        self.check()

    @rule(which=which, is_new=st.booleans())
    def replay(self, which: int, is_new: bool) -> None:
        if (id := self.pick(REPLAYABLE, which)) is not None:
            self.queue.db.execute("select ulak.replay_message(%s, %s, %s)", [id, is_new, self.now])
        self.check()

    @rule(months=st.integers(0, 2))
    def time_passes(self, months: int) -> None:
        self.months += months
        self.maintain()

    def maintain(self) -> None:
        wait_until(self.maintain_once, message="an archive that autovacuum leaves alone")
        assert [name for name, is_needed in self.queue.db.execute(LEFT) if not is_needed] == []
        self.check()

    def maintain_once(self) -> bool:
        try:
            self.queue.db.execute("select ulak.maintain_archive_partitions(1, %s)", [self.now])
            self.queue.db.execute("select ulak.cleanup_dlq(p_now => %s)", [self.now])
            self.queue.db.execute("select ulak.cleanup_old_archive_partitions(%s, %s)", [MONTHS_KEPT, self.now])
        except psycopg.errors.LockNotAvailable:
            return False
        return True


def test_no_body_is_dropped_that_something_needs_and_none_is_kept_for_nothing(db: DB) -> None:
    Machine.queue = Queue(db)

    play(Machine, steps=20, runs=4, runs_of_chaos=300)

    assert Machine.steps >= 50
