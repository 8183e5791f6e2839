"""`buckeye rl --provider prime|ssh`: start a run on another machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from buckeye.cli.dry_run import DryRun, print_dry_run
from buckeye.launch.preflight.devices import parse_gpu_spec

if TYPE_CHECKING:
    from buckeye.config.rl import RLConfig
    from buckeye.remote.base import RemoteRequest
    from buckeye.setup.recipe.flags import TrainFlags


def start_remote(
    config_path: Path,
    flags: TrainFlags,
    *,
    resume: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Start or resume the run on the machine that the flags name; return the exit code.

    `on_start` is called after the checks of this machine.
    """
    from buckeye.remote.remote_run import run_remote

    return run_remote(config_path, _remote_request(flags), resume=resume, on_start=on_start)


def show_remote(
    config_path: Path, config: RLConfig, flags: TrainFlags, *, resume: bool = False, text: str | None = None
) -> int:
    """Print what `start_remote` would order and upload; return the exit code.

    `text` is the content of the configuration if the file does not exist yet.
    """
    from buckeye.remote.dry_run import describe_remote_run

    print("Checking that the run can start on the remote machine ...", file=sys.stderr)
    request = _remote_request(flags)
    return print_dry_run(DryRun(*describe_remote_run(config_path, config, request, resume=resume, text=text)))


def _remote_request(flags: TrainFlags) -> RemoteRequest:
    from buckeye.remote.base import RemoteRequest

    return RemoteRequest(
        gpus=parse_gpu_spec(flags.gpus) if flags.gpus is not None else None,
        provider="ssh" if flags.provider == "ssh" else "prime",
        host=tuple(flags.host),
        max_price=flags.max_price,
        max_hours=flags.max_hours,
        keep=flags.keep,
        yes=flags.yes,
        region=tuple(flags.region),
        disk_gb=flags.disk_gb,
        identity_file=flags.identity_file,
    )
