"""Records of a run: logs, metrics, rollouts, and findings about their values.

This room makes no decisions.
"""
