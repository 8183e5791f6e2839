"""Models that are sharded among ranks, and communication between ranks."""
