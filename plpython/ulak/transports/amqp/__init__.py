"""Delivery to RabbitMQ: AMQP 0-9-1 with publisher confirms."""
