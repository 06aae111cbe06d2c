"""The Python of the extension: it runs inside a PostgreSQL backend, imported by ulak._load_python()."""
