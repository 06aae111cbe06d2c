"""The session of a worker that runs inside the database, as a procedure of a backend."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import plpy

from ulak.sessions.session import CANCELLED, Cancelled, Rows
from ulak.sessions.wake_up import SignalWakeUp


class Backend:
    """Implements session.Session, with plans that are prepared once per run."""

    Error: type[Exception] = plpy.SPIError

    def __init__(self, is_procedure: bool = True) -> None:
        """A function may not commit: its statements belong to the caller's transaction."""
        self._plans: dict[str, plpy.PLyPlan] = {}
        self._is_procedure = is_procedure
        # PostgreSQL's own variable, not getppid(): if the postmaster died before this run began, the parent is another
        # process already.
        self._postmaster = ctypes.c_int.in_dll(ctypes.CDLL(None), "PostmasterPid").value
        # PostgreSQL's own flag that a cancel, a termination or the like is pending.
        self._interrupts = ctypes.c_int.in_dll(ctypes.CDLL(None), "InterruptPending")

    def call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        try:
            plan = self._plans.get(query)
            if plan is None:
                plan = self._plans[query] = plpy.prepare(query, types)
            # Runs in a subtransaction, which any error undoes, even one while the result is read. Not plpy.execute(),
            # which takes the plan for a text first.
            return plan.execute(arguments)  # type: ignore[return-value]
        except plpy.SPIError as error:
            if error.sqlstate == CANCELLED:
                raise Cancelled from error
            raise
        finally:
            # The worker's one commit: neither a transaction nor a snapshot is left while requests are under way.
            if self._is_procedure:
                plpy.commit()

    def check_interrupts(self) -> None:
        # Backends notice the postmaster's death where they wait, but a worker waits in Python. While a backend lives,
        # no new server can start.
        if os.getppid() != self._postmaster:
            plpy.fatal("the postmaster is gone")
        if self._interrupts.value:
            self.call("select")

    def wake_up(self) -> SignalWakeUp | None:
        try:
            return SignalWakeUp()
        except OSError:
            # No file descriptor is left: the worker polls instead.
            return None

    def orders(self) -> None:
        """None: a backend gets its orders only by SQL."""

    def now(self) -> float:
        return time.time()

    def measure_clock(self) -> None:
        """None: the clock is the server's own."""

    def warn(self, line: str) -> None:
        plpy.warning(line)
