# A delivery node, from Debian's packages alone. Where the database is, and the password, come by libpq's environment:
#   docker build -f docker/node.Dockerfile -t ulak-node docker
#   docker run --rm --env-file node.env ulak-node          # PGHOST, PGDATABASE, PGUSER, PGPASSWORD, PGSSLMODE ...
ARG DEBIAN=debian:bookworm-slim
FROM ${DEBIAN}
# Clients of brokers, for who has endpoints there: --build-arg CLIENTS="python3-pika python3-redis"
ARG CLIENTS=
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-psycopg python3-pycurl $CLIENTS \
    && rm -rf /var/lib/apt/lists/*
COPY worker.py /opt/ulak/worker.py
USER nobody
ENTRYPOINT ["python3", "-B", "/opt/ulak/worker.py"]
