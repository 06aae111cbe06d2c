#!/bin/bash
# Style and types of the Python, safety of the built script. Runs inside tests/sandbox.sh.
set -euo pipefail

ruff check --no-cache --config tests/pyproject.toml plpython tests
ruff format --check --no-cache --config tests/pyproject.toml plpython tests
mypy --config-file tests/pyproject.toml --cache-dir "$ULAK_WORK/mypy" plpython/embed.py plpython/loader.py tests/support
