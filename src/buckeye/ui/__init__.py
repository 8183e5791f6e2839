"""Browser interface to runs. It only reads them."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Folder with the files of the page."""
