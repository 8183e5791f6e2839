"""Embedded engine, which samples token ids from a model. It handles no HTTP requests and no messages."""
