"""A message as the worker and its transports see it."""
