"""Transports: how a message travels, one package for each protocol. registry.py knows them all."""
