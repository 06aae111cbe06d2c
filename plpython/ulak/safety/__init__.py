"""What is checked before it is used: addresses, files, secrets, text."""
