-- The demo that compose.yaml adds to the image. Runs once, after ulak was installed.

-- The receiver has a private address of Docker's: these are its default ranges.
select ulak.configure('http_allowed_networks', '172.16.0.0/12, 192.168.0.0/16');
select ulak.create_endpoint('receiver', 'http', '{"url": "http://receiver:8080/"}');

-- Logins: the exporter of monitoring/compose.yaml, which sees counts and health; an operator for the console; nodes.
\getenv scraper_password ULAK_SCRAPER_PASSWORD
\getenv operator_password ULAK_OPERATOR_PASSWORD
\getenv node_password ULAK_NODE_PASSWORD
create role ulak_scraper login password :'scraper_password' in role ulak_monitor;
create role ulak_operator login password :'operator_password' in role ulak_admin;
create role node_1 login password :'node_password' in role ulak_node;
