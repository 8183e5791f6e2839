"""Adapters for third-party environments: one module for each kind, chosen by `load`."""

from __future__ import annotations

from .base import Adapter, AdapterError, Json
from .detect import load

__all__ = ["Adapter", "AdapterError", "Json", "load"]
