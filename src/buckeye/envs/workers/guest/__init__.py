"""What runs in the interpreter of an environment: Python 3.10 or newer, the standard library only.

There it is the package `buckeye_guest`, whatever else is installed, so its modules import each other
relatively.
"""
