"""`buckeye rl --provider prime|ssh`: handing a run to the part that has it carried out elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from buckeye.cli.dry import show_described
from buckeye.cli.rl_ask import confirm
from buckeye.errors import UsageError
from buckeye.run.gpu_layout import parse_gpus

if TYPE_CHECKING:
    from buckeye.cli.rl_flags import TrainFlags
    from buckeye.config.rl import RLConfig
    from buckeye.remote.base import RemoteRequest

_MODULE = "buckeye.remote.launch"  # by name: the command works without it


def remote_is_there() -> bool:
    """Whether this version can train elsewhere."""
    return importlib.util.find_spec(_MODULE.rpartition(".")[0]) is not None and (
        importlib.util.find_spec(_MODULE) is not None
    )


def refuse_remote_if_absent() -> None:
    """Raise UsageError if this version cannot train elsewhere."""
    if not remote_is_there():
        raise UsageError(
            "training on another machine (--provider prime, ssh) is not in this version of Buckeye. The "
            "configuration that --dry-run shows can be started there, with `buckeye rl @ run.toml`"
        )


def push_if_needed(images: Sequence[str], *, asks: bool, yes: bool) -> None:
    """Have the image of this folder's lock file in a registry if the tasks act on it: another machine has
    nothing else. Raises UsageError for one that is only here and that nobody wants to push, or that has no
    registry in its name."""
    from buckeye.tasks.lock import LOCK_FILE, read_lock

    lock_file = Path(LOCK_FILE)
    lock = read_lock(lock_file) if lock_file.is_file() else None
    for image in images:
        if "/" not in image:
            raise UsageError(
                f"the tasks act on the image {image}, whose name has no registry, so that another machine "
                "cannot get it. Push it under another name, and put that name into the tasks (Mcp-Image)\n"
                f"  buckeye env push --image REGISTRY/ORG/{image}"
            )
        if lock is None or lock.image_name.tagged != image or not _is_newer(lock.built_at, lock.pushed_at):
            continue
        if not yes and not (asks and confirm(f"\n{image} was built here and not pushed since. Push it?")):
            raise UsageError(f"{image} was built here and not pushed since. Type\n  buckeye env push")
        from buckeye.cli.env_image import env_push

        env_push()


def _is_newer(built: str | None, pushed: str | None) -> bool:
    """Whether something was built, and not pushed afterwards."""
    if built is None or pushed is None:
        return built is not None
    return datetime.fromisoformat(built).timestamp() > datetime.fromisoformat(pushed).timestamp()


def start_remote(config_path: Path, flags: TrainFlags, *, resume: bool = False) -> int:
    """Carry the run out where the flags say, or go on with it there; the exit code."""
    refuse_remote_if_absent()
    code: int = importlib.import_module(_MODULE).run_remote(config_path, _request(flags), resume=resume)
    return code


def show_remote(config_path: Path, config: RLConfig, flags: TrainFlags, *, resume: bool = False) -> None:
    """Print what `start_remote` would order and send. The file of the configuration need not be there yet."""
    refuse_remote_if_absent()
    dry_run = importlib.import_module("buckeye.remote.dry_run")
    show_described(*dry_run.describe(config_path, config, _request(flags), resume=resume))


def _request(flags: TrainFlags) -> RemoteRequest:
    from buckeye.remote.base import GpuRequest, RemoteRequest

    gpus = parse_gpus(flags.gpus) if flags.gpus is not None else None
    return RemoteRequest(
        gpus=GpuRequest(count=gpus.count, type=gpus.type) if gpus is not None else None,
        provider="ssh" if flags.provider == "ssh" else "prime",
        hosts=tuple(flags.host),
        max_price=flags.max_price,
        max_hours=flags.max_hours,
        keep=flags.keep,
        yes=flags.yes,
        regions=tuple(flags.region),
        disk_gb=flags.disk_gb,
        identity_file=flags.identity_file,
    )
