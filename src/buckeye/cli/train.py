"""`buckeye rl`: start a run from a configuration file or from flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from buckeye.base.distribution import need
from buckeye.base.process import EXIT_INTERRUPTED
from buckeye.cli.dry_run import describe_run, print_dry_run, run_or_show
from buckeye.cli.load import configure_libraries, load
from buckeye.cli.settings_help import asks_for_help, show_help
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.preflight.check import Check
from buckeye.setup.recipe.flags import parse_train_args

_HINT = "Fix these problems; `buckeye rl doctor` with this configuration shows all checks"


def rl(argv: list[str]) -> int:
    """Train a policy: start inference, orchestrator and trainer."""
    if asks_for_help(argv):
        show_help(RLConfig, "rl", argv)
        return 0
    args = parse_train_args(argv)
    if args.is_composed:
        from buckeye.cli.composed_run import run_composed

        configure_libraries("rl")
        return run_composed(args, start)
    settings, as_json = args.plain_settings(), args.flags.as_json
    if as_json and not args.flags.dry_run:
        hint = "Add --dry-run"
        raise UsageError("--json prints the plan of a dry run", code="BK-CLI-CONFLICT", hint=hint)
    config = load(RLConfig, settings, "rl")
    if args.flags.remote:
        from buckeye.cli.remote import show_remote, start_remote

        file, flags, resume = args.only_file(), args.flags, args.is_resume
        return run_or_show(
            config,
            show=lambda: show_remote(file, config, flags, resume=resume),
            start=lambda: start_remote(file, flags, resume=resume),
        )
    program = ["rl"] if Path(sys.argv[0]).name == "rl" else ["buckeye", "rl"]
    command = [*program, *settings]
    return run_or_show(
        config,
        show=lambda: print_dry_run(describe_run(config, command, as_json=as_json)),
        start=lambda: start(config, command),
    )


def start(config: RLConfig, command: list[str], on_start: Callable[[], None] = lambda: None) -> int:
    """Run the quick checks, and start the run.

    `command` is the command line of the run. `on_start` is called when the run begins.
    """
    need("torch", "Training")
    from buckeye.analysis.diagnosis.diagnose import report_findings  # imports numpy
    from buckeye.launch.preflight.devices import this_machine
    from buckeye.launch.preflight.turns import choose_colocation
    from buckeye.launch.rl import run_rl

    config = choose_colocation(config, this_machine().gpus)
    _check_before_start(config)
    code = run_rl(config, command, on_start)
    if code != EXIT_INTERRUPTED:
        report_findings(config.output_dir)
    return code


def _check_before_start(config: RLConfig) -> None:
    """Warn about problems that the quick checks find. Raises UsageError for those that prevent a run.

    The memory plan is an estimate, so it only leads to a warning.
    """
    from buckeye.launch.preflight.doctor import PreflightContext, run_preflight_checks
    from buckeye.launch.preflight.memory_check import MEMORY

    checks = run_preflight_checks(PreflightContext(config=config), "start")
    failed = [check for check in checks if check.state == "failed" and check.name != MEMORY]
    if failed:
        raise _failed_checks_error(failed)
    for check in checks:
        if check.state in ("warning", "failed"):
            print(f"warning: {check.line}", file=sys.stderr)


def _failed_checks_error(failed: list[Check]) -> UsageError:
    """Return the error for failed checks. Its code is the code that all of them share, else BK-PREFLIGHT."""
    if len(failed) == 1 and failed[0].do:
        return UsageError(f"{failed[0].name}: {failed[0].seen}", code=failed[0].code, hint=failed[0].do)
    codes = {check.code for check in failed}
    code = codes.pop() if len(codes) == 1 else "BK-PREFLIGHT"
    return UsageError("\n".join(check.line for check in failed), code=code, hint=_HINT)
