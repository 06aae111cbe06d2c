"""The Python of the extension: it runs inside a PostgreSQL backend, imported by ulak_private.load_python()."""
