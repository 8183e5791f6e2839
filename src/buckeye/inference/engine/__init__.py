"""Embedded engine: samples token ids from a model. It knows neither HTTP nor chat messages."""
