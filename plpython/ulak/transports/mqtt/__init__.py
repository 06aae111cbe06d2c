"""Delivery to brokers of MQTT."""
