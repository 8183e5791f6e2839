"""Sharding of models among ranks, and communication between ranks."""
