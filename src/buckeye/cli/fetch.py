"""`buckeye fetch CONFIG ...`: download everything that a run needs, so that the run needs no network."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.columns import align_columns, quoted
from buckeye.base.disk import human_bytes
from buckeye.base.storage import write_file
from buckeye.base.terminal import status_line
from buckeye.cli.load import load
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError

_FOLDERS = {"HF_HUB_CACHE": "hub", "HF_DATASETS_CACHE": "datasets", "BUCKEYE_ENVIRONMENTS": "environments"}
"""Variables that name the folders of downloads, with the folder in the directory of --to."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_SCRIPT = "offline.sh"


def fetch(
    context: typer.Context,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the downloads. Default: the caches of this machine."),
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="URL", help="Additional package index for environments.")
    ] = None,
    install: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Environment that is in no index: a folder, a wheel or 'NAME @ git+URL'. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Download the model, datasets, environments and images of a run, which then needs no network.

    CONFIG consists of files and flags as for `rl`. A repeated call resumes and completes downloads. Images
    are always stored in the cache of this machine. `rl doctor --offline CONFIG` checks the result.
    """
    if not context.args:
        hint = "Name it as for `rl`: `buckeye fetch @ run.toml`"
        raise UsageError("a configuration is missing", code="BK-CLI-MISSING", hint=hint)
    folders = _choose_folders(to) if to is not None else {}
    config = load(RLConfig, context.args, "buckeye fetch")
    if config.dry_run:
        message = "`buckeye fetch`: does not accept --dry-run"
        raise UsageError(message, code="BK-CLI-CONFLICT", hint="Leave --dry-run out of the configuration")
    from buckeye.launch.fetch import FetchedItem, fetch_run

    items: list[FetchedItem] = []
    with status_line("reading the configuration", quiet=as_json) as progress:
        for item in fetch_run(config, sources=install or (), index=index, progress=progress):
            items.append(item)
    script = _write_script(to, folders) if to is not None else None
    if as_json:
        value = {"items": [asdict(item) for item in items], "script": str(script) if script else None}
        print(json.dumps(value, ensure_ascii=False))
        return
    rows = [
        (
            item.kind,
            item.name,
            human_bytes(item.size),
            "downloaded" if item.downloaded else "was here",
            item.path,
        )
        for item in items
    ]
    print(align_columns([("kind", "name", "size", "state", "path"), *rows]))
    enter = f". {quoted(script)} && " if script else ""
    print(f"\nCheck it without a network: {enter}{shlex.join(['rl', 'doctor', '--offline', *context.args])}")


def _choose_folders(to: Path) -> dict[str, str]:
    """Direct downloads of this process and its children to folders in `to`, and return the variables."""
    folders = {name: str(to.absolute() / folder) for name, folder in _FOLDERS.items()}
    os.environ |= folders
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # the library reads the variable only when it is imported
        constants.HF_HUB_CACHE = folders["HF_HUB_CACHE"]  # type: ignore[attr-defined]
    return folders


def _write_script(to: Path, folders: dict[str, str]) -> Path:
    """Write the shell script that sets the variables for a run with the downloads in `to`."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in (folders | _OFFLINE).items()]
    script = to.absolute() / _SCRIPT
    write_file(script, "\n".join([*lines, ""]))
    return script
