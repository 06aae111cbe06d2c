"""From one major version of PostgreSQL to a newer one. Both have to be there: make test-debian13 brings them."""

from __future__ import annotations

import os

# pg_config of the older server; PG_CONFIG is that of the newer.
OLDER = os.environ.get("ULAK_OLDER")

collect_ignore_glob = [] if OLDER else ["test_*.py"]
