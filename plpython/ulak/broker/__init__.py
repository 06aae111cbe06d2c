"""What the transports to brokers have in common."""
