"""Delivery over HTTP."""
