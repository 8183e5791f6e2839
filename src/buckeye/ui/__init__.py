"""Runs in a browser, and as one HTML file. This room only reads runs."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Folder with the files of the page."""
