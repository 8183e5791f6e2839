"""Comparison of two runs: their differences, and the better one."""
