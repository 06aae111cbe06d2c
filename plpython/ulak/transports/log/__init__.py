"""Delivery into the server's log."""
