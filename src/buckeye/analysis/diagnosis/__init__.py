"""Diagnosis of a run that does not learn: findings from its records and from active tests."""
