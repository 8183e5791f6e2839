"""Third-party environments: installed separately, and run by worker processes."""

from buckeye.envs import stdlib_only
from buckeye.workers import worker_side

# A worker loads `worker_side` and `stdlib_only` as one package, so this process does too.
worker_side.__path__.extend(stdlib_only.__path__)
