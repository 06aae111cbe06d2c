-- Wakes the workers, so that those of the previous version leave as soon as this commits.
do $plpgsql$ begin perform ulak_private.wake_workers(); end $plpgsql$;
