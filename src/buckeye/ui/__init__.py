"""Runs in a browser. It only reads them."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""The files of the page."""
