"""Interface of environments, lookup of environments by id, and validation of their outcomes.

`buckeye.workers` serves third-party environments.
"""
