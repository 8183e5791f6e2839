"""The commands of `rl` that are offered here, by their words. They read more than `buckeye --help` needs."""

from buckeye.cli.compare import compare_runs
from buckeye.cli.diagnose import diagnose_run
from buckeye.cli.replay import replay
from buckeye.cli.rollouts import rollouts

COMMANDS = {
    "rl diagnose": diagnose_run,
    "rl replay": replay,
    "rl compare": compare_runs,
    "rl rollouts": rollouts,
}
