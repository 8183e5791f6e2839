"""Rollouts in the formats of other tools: what Buckeye gives away, and what it reads of others."""
