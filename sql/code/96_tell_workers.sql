-- Workers that run the version before leave when this is committed.
select ulak._wake_workers();
