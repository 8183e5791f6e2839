"""Runs in a browser. It only reads them; tags and notes are in a file of their own."""
