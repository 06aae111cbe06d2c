-- What docker/monitoring.yaml logs in as: it sees counts and health, no payload and no secret.
create role ulak_scraper login password 'scraper' in role ulak_monitor;
