"""The code that transports to brokers share."""
