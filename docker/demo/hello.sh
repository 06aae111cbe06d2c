#!/bin/bash
# What compose ends with: a message that was delivered, and where to look. Where the database is comes by libpq's environment.
set -euo pipefail

id=$(psql -XAtq -c "select ulak.send('receiver', '{\"hello\": \"world\"}')")
status=$(psql -XAtq -c "call ulak.await_delivery($id, '90 seconds')")
psql -XAtq -F ' | ' -c "select to_char(at, 'HH24:MI:SS.MS'), what from ulak.explain($id)"
if [ "$status" != completed ]; then
    echo "message $id is $status:"
    psql -X -c "select * from ulak.doctor()"
    exit 1
fi
echo "message $id was delivered."
echo "The console: $CONSOLE, role ulak_operator, password $ULAK_OPERATOR_PASSWORD"
