"""A node: the worker as a process of its own, on any machine that reaches the database (docker/node/worker.py)."""
