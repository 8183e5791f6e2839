"""The version of Buckeye."""

__version__ = "0.1.0"
