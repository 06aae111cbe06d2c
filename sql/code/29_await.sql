-- Waiting until a message has been delivered, for scripts and tests.

-- In Python, because a wait in SQL would keep its snapshot, and vacuum would keep all rows that have died since. It commits before
-- each wait, so it can't be called inside a transaction; that is no loss, since what isn't committed isn't delivered. By itself, without
-- the modules of the worker, which applications may not load. The caller's search_path holds: all names are qualified.
create or replace procedure ulak.await_delivery(
    p_id bigint,
    p_timeout interval default '30 seconds',
    inout p_status text default null
)
language plpython3u
as $python$
    import time

    # Soon at first, since most are delivered within milliseconds. A cancel is noticed after each wait.
    pause, longest_pause = 0.002, 0.1
    seconds = plpy.execute(plpy.prepare("select pg_catalog.date_part('epoch', $1)", ["pg_catalog.interval"]), [p_timeout])[0]["date_part"]
    if seconds is None or not 0 <= seconds <= 86400:
        plpy.error("p_timeout must be between 0 and 24 hours", sqlstate="22023", detail=f"It is {p_timeout}.")
    until = time.monotonic() + seconds
    look = plpy.prepare("select m.status from ulak.message_status($1) m", ["bigint"])
    while True:
        found = look.execute([p_id])
        if not found:
            plpy.error(
                f"message {p_id} is not known",
                sqlstate="P0002",
                detail="There is none with this id, or the transaction that sent it has not committed.",
                hint="Commit, then pass the id that send() returned.",
            )
        status = found[0]["status"]
        left = until - time.monotonic()
        if status not in ("pending", "processing") or left <= 0:
            return {"p_status": status}
        try:
            plpy.commit()
        except plpy.spiexceptions.InvalidTransactionTermination:
            plpy.error(
                "await_delivery() can't wait inside a transaction",
                sqlstate="25001",
                hint="Commit first, and call it by itself: with autocommit, outside of functions and of begin ... commit.",
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest_pause)
$python$;

comment on procedure ulak.await_delivery(bigint, interval, text) is
    'waits until a message is completed, failed, expired or cancelled, p_timeout at most, and tells its status; outside of '
    'transactions only. Holds no snapshot while it waits: call ulak.await_delivery(1, ''10 s'', null);';
