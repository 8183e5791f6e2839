"""Paths that tests use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
