"""The commands of `rl` that are offered here, by their words. They read more than `buckeye --help` needs."""

from buckeye_audit.comparison.command import compare_runs
from buckeye_audit.curve import curve
from buckeye_audit.diagnosis.command import diagnose_run
from buckeye_audit.exchange.command import export_rollouts
from buckeye_audit.replay.command import bisect, bundle, replay
from buckeye_audit.report.run_command import run_report
from buckeye_audit.rollouts import rollouts

COMMANDS = {
    "rl bisect": bisect,
    "rl bundle": bundle,
    "rl curve": curve,
    "rl diagnose": diagnose_run,
    "rl replay": replay,
    "rl export-rollouts": export_rollouts,
    "rl report": run_report,
    "rl compare": compare_runs,
    "rl rollouts": rollouts,
}
