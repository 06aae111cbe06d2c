"""Delivery into streams of Redis."""
