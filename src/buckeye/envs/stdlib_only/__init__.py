"""Modules that Buckeye imports and that interpreters of environments load by path.

They need only Python 3.10 and the standard library, and import nothing of Buckeye.
"""
