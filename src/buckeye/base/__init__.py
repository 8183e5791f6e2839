"""Basic services for all rooms: processes, files, secrets, HTTP, installation.

Imports only Buckeye's errors, and does not depend on runs.
"""
