"""What workers report, without a worker."""

from __future__ import annotations

import json

from support.queue import Queue


def worked(
    queue: Queue,
    endpoint: int,
    delivered: int = 0,
    failed: int = 0,
    milliseconds: float = 0,
    now: float = 0,
    longest: float | None = None,
    **buckets: int,
) -> None:
    """One report; b3=5 are five requests below 8 ms and not below the limit before it, 2^(11/4) ms."""
    counts = ",".join(str(buckets.get(f"b{i // 4}", 0) if i % 4 == 0 else 0) for i in range(86))
    stats = [
        {
            "endpoint_id": endpoint,
            "delivered": delivered,
            "failed": failed,
            "latency_total_ms": milliseconds,
            "latency_max_ms": longest,
            "latency_histogram": f"[1:86]={{{counts}}}",
        }
    ]
    queue.db.execute(
        "select ulak_private.add_endpoint_stats(%s, date_trunc('minute', %s::timestamptz))",
        [json.dumps(stats), queue.at(now)],
    )


def add_worker(queue: Queue, slot: int = 1, heartbeat: float = 0, state: str = "running") -> None:
    """A row of ulak.workers whose last sign of life was then, and whose session is this one."""
    queue.db.execute(
        """
        insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version)
        values (%s, %s, pg_backend_pid(), %s, %s, %s, %s, '0')
        """,
        [slot, f"worker {slot}", state, queue.at(heartbeat - 10), queue.at(heartbeat), queue.at(heartbeat)],
    )
