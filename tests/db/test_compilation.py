"""PostgreSQL's just-in-time compilation: expensive, and triggered by estimates that are too high for functions."""

from __future__ import annotations

from psycopg.errors import Diagnostic
from support.queue import DB

CALLS = [
    "select ulak.create_endpoint('shop', 'pull', '{}')",
    "select ulak.set_secret('key', 'value')",
    'select ulak.create_endpoint(\'web\', \'http\', \'{"url": "https://a.b", "headers": {"x": {"$secret": "key"}}}\')',
    "select ulak.alter_endpoint('shop', p_retry_policy => '{\"max_retries\": 0}')",
    "select ulak.create_event_type('sold')",
    "select ulak.subscribe('sold', 'shop')",
    "select ulak.send('shop', '1', p_ordering_key => 'a', p_idempotency_key => 'b')",
    "select ulak.send_batch('shop', '{1,2,3}'::jsonb[])",
    "select ulak.publish('sold', '{\"a\": 1}')",
    "select ulak.complete(id, 'w', attempt) from ulak.claim('w', 1)",
    "select ulak.fail(id, 'w', attempt, 'no') from ulak.claim('w', 1)",
    "select ulak.redrive('shop')",
    "select * from ulak.doctor()",
    "select * from ulak.top()",
    "select * from ulak.metrics()",
    "select * from ulak.find_messages('shop')",
    "select * from ulak.explain((select max(id) from ulak.queue))",
    "select * from ulak.get_endpoint_health()",
    "select * from ulak.health_check()",
    "select * from ulak.dlq_summary()",
    "select * from ulak.find_letters('shop')",
    "select * from ulak.retry_schedule",
    "select ulak.report()",
    "select ulak.purge('shop')",
]


def test_no_call_is_compiled(db: DB) -> None:
    plans: list[str] = []

    def hear(notice: Diagnostic) -> None:
        if "Query Text" in (notice.message_primary or ""):
            plans.append(notice.message_primary or "")

    db.add_notice_handler(hear)
    db.execute(
        "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on"
    )
    db.execute("set client_min_messages = log")
    for call in CALLS:
        db.execute(call)  # type: ignore[arg-type]

    assert len(plans) > 10 * len(CALLS)
    assert [plan for plan in plans if "JIT:" in plan] == []
