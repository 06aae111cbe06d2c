"""Sessions of the database: the worker's calls, over plpy or over libpq."""
