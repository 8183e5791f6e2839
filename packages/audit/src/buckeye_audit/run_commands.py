"""The commands of `rl` that are offered here, by their words. They read more than `buckeye --help` needs."""

from buckeye_audit.comparison.command import compare_runs
from buckeye_audit.diagnosis.command import diagnose_run
from buckeye_audit.replay.command import replay
from buckeye_audit.rollouts import rollouts

COMMANDS = {
    "rl diagnose": diagnose_run,
    "rl replay": replay,
    "rl compare": compare_runs,
    "rl rollouts": rollouts,
}
