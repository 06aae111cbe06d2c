-- Workers that run the version before leave when this is committed.
do $plpgsql$ begin perform ulak_private.wake_workers(); end $plpgsql$;
