"""What an environment implements, how one is found, and what comes back from it, checked.

How others' environments are installed or served is not known here.
"""
