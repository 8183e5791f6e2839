"""Optimizers, learning-rate schedules and gradient reduction."""
