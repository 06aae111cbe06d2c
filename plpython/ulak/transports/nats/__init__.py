"""Delivery to servers of NATS: into streams of JetStream, or to its subscribers."""
