"""`rl --provider ... --dry-run`: show the machine and the files for a remote run, without an order."""

from __future__ import annotations

from pathlib import Path

from buckeye.base.columns import counted
from buckeye.base.disk import human_bytes
from buckeye.base.prime_account import prime_account
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.remote.base import RemoteRequest
from buckeye.remote.offers import find_offers, left_out_text, offer_table, price_text
from buckeye.remote.project import Project, make_project
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.remote_run import check_installed, check_single_node
from buckeye.remote.rental import host_target
from buckeye.remote.start_check import obstacles
from buckeye.run_files.directory import check_unused

_MAX_SHOWN_FILES = 20


def describe_remote_run(
    config_path: Path, config: RLConfig, request: RemoteRequest, *, resume: bool, text: str | None = None
) -> tuple[str, list[str], list[str]]:
    """Return a description of the remote run, the reasons why it cannot start, and warnings.

    The description has the machine with its current price, and the files to send. The reasons include the
    failed checks of `start_check`. `text` is the content of a configuration file that is not written yet.
    Raises UsageError for a project that cannot be sent.
    """
    check_installed()
    project = make_project(config, config_path, resume=resume)
    parts, warnings, errors = [_sent_text(project)], [], []
    try:
        check_single_node(config.cluster, hosts=len(request.host) or 1)
    except UsageError as error:
        errors.append(str(error))
    try:
        parts.insert(0, _machine_text(project, request))
    except BuckeyeError as error:
        warnings.append(f"not checked: the offers and their price: {error}")
    is_rental, notes = request.provider != "ssh", list[str]()
    errors += obstacles(project, request, is_rental=is_rental, tell=notes.append, text=text)
    warnings += [note.removeprefix("warning: ") for note in notes]
    if not resume:
        try:
            check_unused(config.output_dir, resume_command=f"buckeye rl @ {config_path} --resume ...")
        except UsageError as error:
            errors.append(str(error))
    return "\n\n".join(parts), errors, warnings


def _machine_text(project: Project, request: RemoteRequest) -> str:
    if request.provider == "ssh":
        host_target(request.host)
        return f"would be used: {', '.join(request.host)}; nothing is rented"
    needed = project.disk_gb if request.disk_gb is None else request.disk_gb
    with PrimeProvider(prime_account()) as provider:
        offers, left_out = find_offers(provider, request, disk_gb=needed)
    first = offers[0]
    hours = "" if request.max_hours is None else f", for at most {counted(request.max_hours, 'hour')}"
    lines = [
        offer_table(offers),
        f"would be ordered now: {first.gpus} from {first.cloud} with {needed} GB of disk, "
        f"{price_text(first)}{hours}",
    ]
    if left_out:
        lines.append(f"left out: {left_out_text(left_out)}")
    return "\n".join(lines)


def _sent_text(project: Project) -> str:
    manifest = project.manifest
    sizes = {name: path.stat().st_size for name, path in manifest.files.items()}
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:_MAX_SHOWN_FILES]
    lines = [f"would be sent: {counted(len(sizes), 'file')}, {human_bytes(manifest.size)}, of {project.root}"]
    lines += [f"  {human_bytes(sizes[name]):>9}  {name}" for name in largest]
    if len(sizes) > len(largest):
        lines.append(f"  and {len(sizes) - len(largest)} smaller ones")
    named = {
        "links out of it, which stay": manifest.outside,
        "keys": sorted(project.secrets),
        "environments to install": [one.what for one in project.environments],
    }
    return "\n".join([*lines, *(f"{title}: {', '.join(names)}" for title, names in named.items() if names)])
