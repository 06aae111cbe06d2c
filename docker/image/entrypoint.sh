#!/bin/bash
# The official entrypoint, with what ulak needs of the server's settings: pg_cron, in the database that POSTGRES_DB names.
# pg_cron 1.4 makes every job wait for the longest one when it uses background workers, so jobs connect by the socket.
set -euo pipefail

if [ "${1:-postgres}" = postgres ]; then
    if [ "$#" -gt 0 ]; then shift; fi
    # What was given comes last, and so it counts.
    set -- postgres \
        -c shared_preload_libraries=pg_cron \
        -c "cron.database_name=${POSTGRES_DB:-${POSTGRES_USER:-postgres}}" \
        -c cron.use_background_workers=off \
        -c cron.host=/var/run/postgresql \
        "$@"
fi
exec docker-entrypoint.sh "$@"
