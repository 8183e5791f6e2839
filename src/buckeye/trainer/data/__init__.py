"""Conversion of chats to samples, and packing of samples into micro-batches."""
