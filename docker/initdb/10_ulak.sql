-- Runs once, when the container's database is made.

create extension pg_cron;
create extension ulak cascade;

-- The receiver of compose.yaml has an address of Docker's private network.
select ulak.configure('http_allow_internal_urls', 'true');
select ulak.create_endpoint('receiver', 'http', '{"url": "http://receiver:8080/"}');

-- Two workers and the maintenance, run by pg_cron.
select * from ulak.start(2);
