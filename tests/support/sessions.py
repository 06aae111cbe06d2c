"""Several sessions at once, and waiting for what they do instead of sleeping."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import psycopg

Result = TypeVar("Result")


# How long anything may take before it counts as never coming. A wait ends as soon as its condition holds, so patience costs nothing.
PATIENCE = 120
# Patience ends before pytest ends the process of a test that hangs (pyproject.toml).
MOST_STRAIN = 5.0
# After this, a look at a stopped process is taken for one that waits for it.
LOOK_SECONDS = 2


def patience() -> float:
    return PATIENCE * strain()


def wait_until(
    predicate: Callable[[], Result],
    message: str = "the condition",
    *,
    interval: float = 0.005,
    seconds: float = PATIENCE,
) -> Result:
    """The first true value of the predicate. Only the bench, whose amounts of work are chosen, says how many seconds that may take."""
    began = time.monotonic()
    while not (value := predicate()):
        # The machine may have become busy meanwhile: asked again each time.
        if (waited := time.monotonic() - began) > seconds and waited > seconds * strain():
            raise TimeoutError(f"{message} was not met within {waited:.0f} s; last value: {value!r}")
        time.sleep(interval)
    return value


def strain() -> float:
    """How many runnable processes share a processor, at least 1. The load average lags, so the
    processes that are runnable right now count, too."""
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return min(MOST_STRAIN, max(1.0, max(os.getloadavg()[0], running) / (os.cpu_count() or 1)))


def backend_pid(session: psycopg.Connection[Any] | int) -> int:
    return session if isinstance(session, int) else session.info.backend_pid


def wait_until_blocked(session: psycopg.Connection[Any] | int, observer: psycopg.Connection[Any]) -> list[int]:
    """Returns the pids that hold `session` up, once another session does. The observer must be in autocommit mode."""
    pid = backend_pid(session)

    def blockers() -> list[int]:
        row = observer.execute("select pg_blocking_pids(%s)", [pid]).fetchone()
        assert row is not None
        return list(row[0])

    return wait_until(blockers, f"backend {pid} waiting for a lock")


def is_waiting(pid: int) -> bool:
    """A process that has just been signalled is runnable."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def wait_until_idle(pid: int) -> None:
    wait_until(lambda: is_waiting(pid), f"{pid} waiting", interval=0)


def wait_until_gone(session: psycopg.Connection[Any] | int, observer: psycopg.Connection[Any]) -> None:
    pid = backend_pid(session)
    query = "select not exists (select from pg_stat_activity where pid = %s)"
    wait_until(lambda: (observer.execute(query, [pid]).fetchone() or [False])[0], f"end of backend {pid}")


def gather(functions: Iterable[Callable[[], Result]]) -> list[Result]:
    """Runs all at once, one thread each; results in order. All end before the first error is raised again."""
    calls = list(functions)
    with ThreadPoolExecutor(max_workers=max(len(calls), 1)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


class Running:
    """A statement in a thread of its own, for a session that is expected to wait."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(function)
        self._pool.shutdown(wait=False)

    def is_done(self) -> bool:
        return self._future.done()

    def is_done_within(self, seconds: float) -> bool:
        return not wait([self._future], seconds).not_done

    def result(self) -> Any:
        return self._future.result(patience())


def hold(pid: int) -> None:
    """SIGSTOP, and each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)

    def is_stopped() -> bool:
        threads = Path(f"/proc/{pid}/task").glob("*/stat")
        return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads)

    wait_until(is_stopped, message="a process that has stopped")


def stop_between_transactions(value: Callable[..., Any], pid: int) -> None:
    """SIGSTOP to a backend that waits, outside of any transaction. Anywhere else it would keep its locks, of SQL or of the server's own, and
    everything would wait for it: even a look at pg_stat_activity, if it was writing its line there."""
    query = "select backend_xid is null and backend_xmin is null from pg_stat_activity where pid = %s"

    def stop() -> bool:
        if not is_waiting(pid):
            return False
        hold(pid)
        look = Running(lambda: value(query, pid))
        if look.is_done_within(LOOK_SECONDS) and look.result():
            return True
        os.kill(pid, signal.SIGCONT)
        look.result()
        return False

    wait_until(stop, "a moment without a lock", interval=0.002)
