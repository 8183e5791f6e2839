"""What can go wrong here. The faces map these onto the errors of the framework they serve."""

from __future__ import annotations


class DakotaError(Exception):
    """Base of this package's errors."""


class ArgumentError(DakotaError):
    """A wrong argument of `load_environment`; the message says which and what to write."""
