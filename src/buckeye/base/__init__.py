"""Basic functions for all other packages: processes, files, secrets, HTTP, installation.

This package imports only `buckeye.errors` of Buckeye, and does not depend on runs.
"""
