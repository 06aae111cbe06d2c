#!/bin/bash
# Stands in for the entrypoint of the official image of PostgreSQL, which no registry is needed for: it makes the cluster that
# PGDATA names, runs /docker-entrypoint-initdb.d in the database of POSTGRES_DB, and becomes the server.
set -euo pipefail

export POSTGRES_USER=${POSTGRES_USER:-postgres}
export POSTGRES_DB=${POSTGRES_DB:-$POSTGRES_USER}
if [ "$1" != postgres ]; then exec "$@"; fi

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    chown -R postgres: "$PGDATA" /var/run/postgresql
    exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    : "${POSTGRES_PASSWORD:?the official image refuses to start without it}"
    # shellcheck disable=SC2086
    initdb ${POSTGRES_INITDB_ARGS:-} --username="$POSTGRES_USER" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") --no-sync
    printf 'host all all all scram-sha-256\n' >> "$PGDATA/pg_hba.conf"
    # As the official one does: with the settings of the command, on the socket alone.
    pg_ctl -D "$PGDATA" -w start -o "$(printf '%q ' "${@:2}") -c listen_addresses='' -p ${PGPORT:-5432}"
    sql=(psql -v ON_ERROR_STOP=1 --no-password --no-psqlrc --username "$POSTGRES_USER")
    if [ "$POSTGRES_DB" != postgres ]; then
        "${sql[@]}" --dbname postgres --set name="$POSTGRES_DB" <<< 'create database :"name";'
    fi
    for file in /docker-entrypoint-initdb.d/*; do
        echo "running $file"
        "${sql[@]}" --dbname "$POSTGRES_DB" -f "$file"
    done
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@"
