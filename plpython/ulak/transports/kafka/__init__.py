"""Delivery to Apache Kafka, by librdkafka's idempotent producer."""
