#!/bin/bash
# Style and types of the Python, safety of the built script. Runs inside tests/sandbox.sh.
set -euo pipefail

ruff check --no-cache --config tests/pyproject.toml plpython tests docker sql/plain.py control control/ulak-setup
ruff format --check --quiet --no-cache --config tests/pyproject.toml plpython tests docker sql/plain.py control control/ulak-setup
MYPYPATH=plpython:tests:docker/console mypy --config-file tests/pyproject.toml --cache-dir "$ULAK_WORK/mypy" --no-error-summary \
    sql/plain.py plpython/embed.py plpython/loader.py plpython/ulak tests/support tests/bench tests/conftest.py docker/console/ulak_console docker/node/worker.py control/ulak-setup control/meta.py control/archive.py

# CREATE EXTENSION runs the script with this search_path. What pgspot says about names in functions that don't pin it
# (PS001, PS005, PS009, PS016, PS017) is left to tests/conventions, which knows who may call them; its parser of
# PL/pgSQL doesn't know variables of a table's type.
rm -rf "$ULAK_WORK/lint"
make -s build sql BUILD="$ULAK_WORK/lint"
{
    echo 'set search_path to pg_catalog, pg_temp;'
    # The whole; an upgrade is a part of it.
    cat $(ls "$ULAK_WORK"/lint/ulak--*.sql | grep -v -e '--.*--')
} > "$ULAK_WORK/lint/pgspot.sql"
# psql's own commands are none of SQL.
grep -v '^\\' "$ULAK_WORK"/lint/ulak-plain-*.sql | sed 's/ \\gset$/;/' > "$ULAK_WORK/lint/plain.sql"
pgspot --no-plpgsql --ignore PS001 --ignore PS005 --ignore PS009 --ignore PS016 --ignore PS017 --ignore-lang plpython3u \
    "$ULAK_WORK/lint/pgspot.sql" "$ULAK_WORK/lint/plain.sql"
