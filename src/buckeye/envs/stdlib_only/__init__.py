"""Modules that environment interpreters also load, by path.

They need only Python 3.10 and the standard library, and import nothing of Buckeye.
"""
