"""`buckeye rl init`: write the configuration of an environment from its tools, and try it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.setup.init.environment_source import EnvironmentSource
    from buckeye.setup.init.prepare_config import PreparedConfig
    from buckeye.setup.init.scripted_rollout import TrialResult


def init(
    env: Annotated[
        str | None,
        typer.Argument(
            metavar="ENV", help="image:tag, image@sha256:..., a folder, buckeye.lock.yaml, or a URL."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file. Default: configs/<env>.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
    command: Annotated[
        str | None, typer.Option(help="The environment is this program, an MCP server on stdio.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For a URL; write keys as $NAME, which is looked up."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="TASKS",
            help="The first prepares and grades the rollout. Without ENV: the servers of all.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="TOOL", help="Only this tool, or those that a pattern fits, as 'get_*'."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="TOOL", help="Without this tool, or those that a pattern fits."),
    ] = None,
    try_all: Annotated[
        bool,
        typer.Option("--try-all", help="Also call tools that say they destroy, or act on the outside world."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration; write nothing.")
    ] = False,
) -> None:
    """Write the configuration of an MCP environment from its tools, and play a scripted rollout with it."""
    from buckeye.base.process import die_with_parent
    from buckeye.setup.init.output import next_step_text
    from buckeye.setup.init.prepare_config import prepare_config

    die_with_parent()
    prepared = prepare_config(
        env,
        command=command,
        headers=_headers(header or []),
        output=output,
        force=force or dry_run,
        tasks=dataset,
        include=include or (),
        exclude=exclude or (),
    )
    if dry_run:
        _print_dry_run(prepared)
        return
    proof = write_and_try_config(prepared, try_all=try_all)
    if proof.passed:
        typer.echo(next_step_text(prepared.path, prepared.task_file))
    raise typer.Exit(0 if proof.passed else 1)


def write_and_try_config(prepared: PreparedConfig, *, try_all: bool) -> TrialResult:
    """Write the configuration, run a scripted rollout with it, and print the result."""
    from buckeye.base.storage import write_directory, write_file
    from buckeye.mcp.config import load_gym_config
    from buckeye.setup.init.output import summary_text, trials_text
    from buckeye.setup.init.prepare_config import try_config

    path = prepared.path
    try:
        if prepared.files is not None and not prepared.files.exists():
            write_directory(prepared.files, functools.partial(_copy, prepared.source))
        write_file(path, prepared.generated.text)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Name another file with -o.") from None
    typer.echo(summary_text(prepared.generated, path, prepared.files))
    proof = try_config(prepared, load_gym_config(path), try_all=try_all)
    without = prepared.command_without({trial.action for trial in proof.failed})
    again = (*without, "--try-all") if without and try_all else without
    typer.echo(trials_text(proof, prepared.source.display_name, again))
    return proof


def _copy(source: EnvironmentSource, target: Path) -> None:
    assert source.files is not None
    shutil.copytree(source.files, target, symlinks=True, dirs_exist_ok=True)


def _print_dry_run(prepared: PreparedConfig) -> None:
    typer.echo(prepared.generated.text, nl=False)
    for note in prepared.generated.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"Nothing was written; without --dry-run it goes to {prepared.path}", err=True)


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    from buckeye.mcp.tasks.dataset_rows import is_plaintext_key

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError("--header: write NAME=VALUE, as --header 'Mcp-Image=my-org/my-env:latest'")
        if is_plaintext_key(name, value):
            raise UsageError(
                f"--header {name}: other users can see flags. Write a variable in single quotes, as "
                f"'{name}=Bearer $MY_KEY'; it is looked up in the environment and in .env"
            )
        found[name.strip()] = value
    return found


COMMANDS = {"rl init": init}
