"""Errors of this package; the adapters map them to the errors of their framework."""

from __future__ import annotations


class DakotaError(Exception):
    """Base class of this package's errors."""


class ArgumentError(DakotaError):
    """Invalid argument of `load_environment`. `message` names it, and `hint` is what to do, or ""."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}. {hint[:1].upper()}{hint[1:]}" if hint else message)
        self.message, self.hint = message, hint
