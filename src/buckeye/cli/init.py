"""`buckeye rl init`: write the configuration of an environment from its tools, and try it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.cli.errors import write_error
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.setup.init.environment_source import EnvironmentSource
    from buckeye.setup.init.prepare_config import PreparedConfig
    from buckeye.setup.init.trial import TrialResult


def init(
    env: Annotated[
        str | None,
        typer.Argument(
            metavar="ENV", help="image:tag, image@sha256:..., a folder, buckeye.lock.yaml, or a URL."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: configs/<env>.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
    command: Annotated[
        str | None, typer.Option(help="Program that is an MCP server on stdio, in place of ENV.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="HTTP header for a URL. Write a key as $NAME, the name of a variable."
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="TASKS",
            help="Task file. Its first task sets up and grades the trial. Without ENV: their servers.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL", help="Use only this tool. A pattern such as 'get_*' selects several tools."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="TOOL", help="Leave out this tool, or the tools that match a pattern."),
    ] = None,
    try_all: Annotated[
        bool,
        typer.Option("--try-all", help="Also call tools that the server marks as destructive or open-world."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration; write nothing.")
    ] = False,
) -> None:
    """Write the configuration of an MCP environment from its tools, and try its actions."""
    from buckeye.base.process import die_with_parent
    from buckeye.setup.init.output import next_step_text
    from buckeye.setup.init.prepare_config import prepare_config

    die_with_parent()
    prepared = prepare_config(
        env,
        command=command,
        headers=_parse_headers(header or []),
        output=output,
        force=force or dry_run,
        tasks=dataset,
        include=include or (),
        exclude=exclude or (),
    )
    if dry_run:
        _print_dry_run(prepared)
        return
    trial = write_and_try_config(prepared, try_all=try_all)
    if trial.passed:
        typer.echo(next_step_text(prepared.path, prepared.task_file))
    raise typer.Exit(0 if trial.passed else 1)


def write_and_try_config(prepared: PreparedConfig, *, try_all: bool) -> TrialResult:
    """Write the configuration, try its actions, and print the result."""
    from buckeye.base.storage import write_directory, write_file
    from buckeye.mcp.config import load_gym_config
    from buckeye.setup.init.output import summary_text, trials_text
    from buckeye.setup.init.prepare_config import try_config

    path = prepared.path
    try:
        if prepared.files is not None and prepared.files.exists():
            typer.echo(
                f"note: {prepared.files} exists and was not replaced; delete it to copy the files again"
            )
        elif prepared.files is not None:
            write_directory(prepared.files, functools.partial(_copy_files, prepared.source))
        write_file(path, prepared.generated.text)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise write_error(path, error, hint="Name another file with -o") from None
    typer.echo(summary_text(prepared.generated, path, prepared.files))
    result = try_config(prepared, load_gym_config(path), try_all=try_all)
    without_failed = prepared.command_without({trial.action for trial in result.failed})
    if without_failed and try_all:
        without_failed = (*without_failed, "--try-all")
    typer.echo(trials_text(result, prepared.source.display_name, without_failed))
    return result


def _copy_files(source: EnvironmentSource, target: Path) -> None:
    assert source.files is not None
    shutil.copytree(source.files, target, symlinks=True, dirs_exist_ok=True)


def _print_dry_run(prepared: PreparedConfig) -> None:
    typer.echo(prepared.generated.text, nl=False)
    for note in prepared.generated.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"Nothing was written. Without --dry-run, the file would be {prepared.path}", err=True)


def _parse_headers(pairs: Sequence[str]) -> dict[str, str]:
    from buckeye.mcp.tasks.dataset_rows import is_plaintext_key

    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            hint = "Write NAME=VALUE: --header 'Mcp-Image=my-org/my-env:latest'"
            raise UsageError("--header: not NAME=VALUE", code="BK-CLI-ARGUMENT", hint=hint)
        if is_plaintext_key(name, value):
            raise UsageError(
                f"--header {name}: has a key as text, which other users of this machine can read",
                code="BK-CLI-ARGUMENT",
                hint=f"Write a variable in single quotes: '{name}=Bearer $MY_KEY'. Its value is read from "
                "the environment or from .env",
            )
        headers[name.strip()] = value
    return headers
