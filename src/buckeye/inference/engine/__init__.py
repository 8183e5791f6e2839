"""Embedded engine: weights, cache, decoding, sampling. Handles neither HTTP nor messages."""
