"""Why a run does not learn: findings, from what it has recorded and from tests."""
