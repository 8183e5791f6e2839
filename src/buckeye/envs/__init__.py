"""Environments: their protocol, their registry, and validation of their outcomes.

Installing and serving third-party environments belongs to other rooms.
"""
