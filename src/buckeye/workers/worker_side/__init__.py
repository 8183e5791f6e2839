"""What runs in the interpreter of an environment: Python 3.10 or newer, the standard library only.

There it is the package `buckeye_worker_side`, whatever else is installed, so its modules import each other
relatively.
"""
