"""Modules that Buckeye imports, and that the interpreters of third-party environments load from their path.

These modules need Python 3.10 and the standard library, and import nothing else of Buckeye.
"""
