"""Environments that were not written for Buckeye: installed apart, played by worker processes."""

from buckeye.envs import stdlib_only
from buckeye.workers import worker_side

# A worker finds these two modules by path beside its own (see `workers.process`); so they are found here.
worker_side.__path__.extend(stdlib_only.__path__)
