"""Settings: files and flags become one object, or one error message with every problem.

This room performs no actions.
"""
