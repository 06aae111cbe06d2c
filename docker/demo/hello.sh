#!/bin/bash
# The end of compose: a delivered message, and where to look. libpq's environment says where the database is.
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
