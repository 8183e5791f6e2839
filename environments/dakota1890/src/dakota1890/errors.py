"""Errors of this package; the adapters map them to the errors of their framework."""

from __future__ import annotations


class DakotaError(Exception):
    """Base class of this package's errors."""


class ArgumentError(DakotaError):
    """Invalid argument of `load_environment`; the message names it and the valid values."""
