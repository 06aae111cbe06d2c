-- Workers that run the version before leave when this is committed.
do $plpgsql$ begin perform ulak._wake_workers(); end $plpgsql$;
