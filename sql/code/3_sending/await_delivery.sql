-- Waiting until a message has been delivered, for scripts and tests.

-- A procedure that commits can't pin its search_path, so all names are qualified. CASE would look its operator up.
create or replace procedure ulak.await_delivery(
    p_id bigint,
    p_timeout interval default '30 seconds',
    inout p_status text default null
)
language plpgsql
as $plpgsql$
declare
    v_problem pg_catalog.text;
begin
    if p_timeout is null
        or not pg_catalog.date_part('epoch', p_timeout) operator(pg_catalog.>=) 0
        or not pg_catalog.date_part('epoch', p_timeout) operator(pg_catalog.<=) 86400
    then
        raise exception 'p_timeout must be between 0 and 24 hours'
            using errcode = '22023', detail = pg_catalog.format('It is %s.', p_timeout);
    end if;
    call ulak_private.await_delivery(p_id, pg_catalog.date_part('epoch', p_timeout), p_status, v_problem);
    if v_problem operator(pg_catalog.=) 'unknown' then
        raise exception 'message % is not known', p_id
            using
                errcode = 'P0002',
                detail = 'There is none with this id, or the transaction that sent it has not committed.',
                hint = 'Commit, then pass the id that send() returned.';
    elsif v_problem operator(pg_catalog.=) 'in a transaction' then
        raise exception 'await_delivery() can''t wait inside a transaction'
            using
                errcode = '25001',
                hint = 'Commit first, and call it by itself: with autocommit, outside of functions and of begin ... commit.';
    end if;
end
$plpgsql$;

-- In Python, because a wait in SQL would keep its snapshot, and vacuum couldn't remove the rows that die meanwhile. It commits before each
-- wait, so it can't be called inside a transaction; there it would wait in vain, since uncommitted messages aren't delivered. It doesn't
-- use the worker's modules, which applications may not load. It runs with the caller's search_path, so all names are qualified. It raises
-- no errors of its own: Python's come with a traceback.
create or replace procedure ulak_private.await_delivery(p_id bigint, p_seconds double precision, inout p_status text, inout p_problem text)
language plpython3u
as $python$
    import time

    # Soon at first, since most are delivered within milliseconds. A cancel is noticed after each wait.
    pause, longest_pause = 0.002, 0.1
    until = time.monotonic() + p_seconds
    look = plpy.prepare("select m.status from ulak.message_status($1) m", ["bigint"])
    while True:
        found = look.execute([p_id])
        if not found:
            return {"p_status": None, "p_problem": "unknown"}
        status = found[0]["status"]
        left = until - time.monotonic()
        if status not in ("pending", "processing") or left <= 0:
            return {"p_status": status, "p_problem": None}
        try:
            plpy.commit()
        except plpy.spiexceptions.InvalidTransactionTermination:
            return {"p_status": status, "p_problem": "in a transaction"}
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest_pause)
$python$;

comment on procedure ulak.await_delivery(bigint, interval, text) is
    'waits until a message is completed, failed, held, expired or cancelled, but no longer than p_timeout, and returns its status; '
    'only outside of a transaction. It holds no snapshot while it waits: call ulak.await_delivery(1, ''10 s'', null);';
