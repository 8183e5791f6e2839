"""`buckeye rl init`: the configuration of an environment, written from what it announces, and tried."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buckeye.cli.help import Commands
from buckeye.cli.terminal import status_line
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye_mcp.init.generate import Generated
    from buckeye_mcp.init.scripted_rollout import Proof
    from buckeye_mcp.init.source import Source
    from buckeye_mcp.tasks.lock import ToolEntry
    from buckeye_mcp.tasks.task_schema import McpTask


# What `buckeye rl init` prints.


def summary(generated: Generated, path: Path) -> str:
    """What was written, and what waits for a person."""
    plan = generated.plan
    lines = [f"{path}: {_count(len(plan.actions), 'action')}, and done()"]
    if plan.flagged:
        lines.append(f"not mapped, to be looked at: {', '.join(one.action.name for one in plan.flagged)}")
    lines += [f"note: {note}" for note in generated.notes]
    if generated.decisions:
        lines.append(f"{_count(len(generated.decisions), 'decision')} for you; see CHECK in the file")
    return "\n".join(lines)


def trials_text(proof: Proof, shown: str) -> str:
    """What came of the scripted rollout."""
    lines = [f"Scripted rollout on {shown}"]
    width = max((len(trial.action) for trial in proof.trials), default=0)
    for trial in proof.trials:
        what = trial.call if trial.ending in ("worked", "refused", "failed") else ""
        line = f"  {trial.action:{width}}  {trial.ending:9}  {what}"
        lines.append((line + (f"  {trial.said}" if trial.said else "")).rstrip())
    if proof.note:
        lines.append(f"note: {proof.note}")
    if proof.reward is not None:
        lines.append(f"  the first task's grading gave {proof.reward:g}")
    if proof.passed:
        lines.append("The rollout went through the configuration to the tools, and ended with done().")
    else:
        lines.append(f"not proven: {_why(proof)}")
    return "\n".join(lines)


def next_text(path: Path, tasks: Path | None) -> str:
    """What to type when the configuration is right, with `tasks` where they are known."""
    train = ["buckeye", "rl", "--config", str(path), "--dataset", str(tasks or "tasks.json")]
    return (
        "Next: train on its tasks, which may be a JSON file or a dataset (`buckeye hf`).\n"
        f"  {shlex.join(train)}"
    )


def as_object(generated: Generated, path: Path, proof: Proof | None) -> dict[str, Any]:
    """All of it as one JSON object."""
    plan = generated.plan
    return {
        "config": str(path),
        "actions": [action.name for action in plan.actions],
        "flagged": {one.action.tool.name: one.reason for one in plan.flagged},
        "left_out": dict(plan.left_out),
        "decisions": list(generated.decisions),
        "notes": list(generated.notes),
        "proof": None if proof is None else {**asdict(proof), "passed": proof.passed},
    }


def _why(proof: Proof) -> str:
    failed = [trial.action for trial in proof.trials if trial.ending == "failed"]
    if proof.problem:
        return f"{proof.problem}\nThe file is written; look at the environment."
    if failed:
        return f"{', '.join(failed)} did not work. The file is written; look at those actions."
    if not proof.trials:
        return "no tool is mapped. Look at what is marked CHECK in the file."
    waiting = [trial for trial in proof.trials if trial.ending == "not tried"]
    if len(waiting) == len(proof.trials):
        return "no action could be tried. Look at what is marked CHECK in the file."
    if proof.stop_reason != "done":
        return f"the rollout ended with {proof.stop_reason}, not with done."
    return (
        "every tool refused made-up arguments. If that is right, the file is; to be sure, name tasks that "
        "prepare the environment with --tasks."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# `buckeye rl init`: the configuration of an environment, written from what it announces, and tried.

init_app = Commands(add_completion=False)


def run_init(argv: Sequence[str]) -> int:
    """Carry out `rl init ...`."""
    from buckeye.cli.errors import run_typer

    return run_typer(init_app, argv, "buckeye rl init")


@init_app.command()
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
    build: Annotated[
        bool,
        typer.Option(
            "--build", "-b", help="Build the image of the folder first, with docker, podman or buildah."
        ),
    ] = False,
    command: Annotated[
        str | None, typer.Option(help="The environment is this program, an MCP server on stdio.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For a URL; write keys as $NAME, which is looked up."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Its tasks: the first prepares and grades the rollout. Default: the folder's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the configuration of an MCP environment from its tools, and play a scripted rollout with it."""
    from buckeye.base.process import die_with_parent

    if build and dry_run:
        raise UsageError("--build makes an image, and with --dry-run nothing is made: leave one of them out")
    die_with_parent()
    prepared = prepare(
        env,
        command=command,
        headers=_headers(header or []),
        build=build,
        output=output,
        force=force or dry_run,
        tasks=tasks,
    )
    if dry_run:
        _print_dry_run(prepared, as_json=as_json)
        return
    raise typer.Exit(write_and_prove(prepared, as_json=as_json))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A configuration that is made and not yet written: what to write where, and what it was made from."""

    generated: Generated
    listed: Sequence[ToolEntry]
    source: Source
    path: Path
    tasks: Sequence[McpTask]
    task_file: Path | None


def prepare(
    env: str | None,
    *,
    command: str | None = None,
    headers: Mapping[str, str] | None = None,
    build: bool = False,
    output: Path | None = None,
    force: bool = False,
    tasks: Path | None = None,
) -> Prepared:
    """Look at an environment and make its configuration; nothing is written. Raises UsageError, for one whose
    file is there already too, before anything is started."""
    from buckeye_mcp.init.source import find_source
    from buckeye_mcp.sandbox.build import build_image

    source = find_source(env, command=command, headers=headers or {}, build=build)
    path = _free_path(output, source, force=force)
    if source.to_build is not None:
        with status_line(f"building {source.environment.image}"):
            build_image(source.to_build, source.environment.image)
    file = tasks or source.tasks
    known_tasks = _tasks(file) if file is not None else []
    generated, listed = _generated(source, known_tasks)
    return Prepared(
        generated=generated, listed=listed, source=source, path=path, tasks=known_tasks, task_file=file
    )


def _tasks(file: Path) -> list[McpTask]:
    """All tasks of a file or a dataset. Where they act does not matter here, so it may be left out."""
    from buckeye_mcp.tasks.dataset import is_dataset, read_splits
    from buckeye_mcp.tasks.lock import Lock
    from buckeye_mcp.tasks.rows import read_with_lock

    if is_dataset(file):
        return [task for tasks in read_splits(file) for task in tasks]
    return read_with_lock(file, Lock(image="any:latest"))[0]


def _generated(source: Source, tasks: Sequence[McpTask]) -> tuple[Generated, list[Any]]:
    from buckeye_mcp.config import DefaultsConfig
    from buckeye_mcp.init.generate import generate_config
    from buckeye_mcp.init.source import live_tools

    listed = list(source.tools or ())
    if source.tools is None:
        seconds = DefaultsConfig().setup_timeout
        with status_line(f"waiting for {source.shown} to start and tell its tools, at most {seconds:g} s"):
            listed = asyncio.run(live_tools(source, seconds))
    calls = [call for task in tasks for call in (*task.setup_tool, *task.evaluate_tool)]
    return (
        generate_config(
            source.environment,
            listed,
            preparing={call.name for task in tasks for call in task.setup_tool},
            grading={call.name for task in tasks for call in task.evaluate_tool},
            context_values=_constants([call.arguments for call in calls]),
        ),
        listed,
    )


def _constants(arguments: Sequence[Mapping[str, Any]]) -> dict[str, str | int]:
    """Arguments that have the same value wherever the tasks give them."""
    values: dict[str, set[str | int]] = {}
    for one in arguments:
        for name, value in one.items():
            if isinstance(value, str | int):
                values.setdefault(name, set()).add(value)
    return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}


def write_and_prove(prepared: Prepared, *, as_json: bool, goes_on: bool = False) -> int:
    """Write the configuration, play a scripted rollout with it, print what came of it (and what to type next,
    unless somebody goes on with it); the exit code."""
    from buckeye.base.storage import write_file
    from buckeye.errors import BuckeyeError
    from buckeye_mcp.config import load_gym_config
    from buckeye_mcp.init.scripted_rollout import Proof, prove

    generated, path = prepared.generated, prepared.path
    try:
        write_file(path, generated.text)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Name another file with -o.") from None
    if not as_json:
        typer.echo(summary(generated, path))
    try:
        first = prepared.tasks[0] if prepared.tasks else None
        with status_line(f"playing a scripted rollout with {prepared.source.shown}"):
            proof = asyncio.run(prove(load_gym_config(path), list(prepared.listed), prepared.source, first))
    except BuckeyeError as error:
        proof = Proof((), problem=str(error))
    if as_json:
        typer.echo(json.dumps(as_object(generated, path, proof), ensure_ascii=False))
    else:
        typer.echo(trials_text(proof, prepared.source.shown))
        if proof.passed and not goes_on:
            typer.echo(next_text(path, prepared.task_file))
    return 0 if proof.passed else 1


def _print_dry_run(prepared: Prepared, *, as_json: bool) -> None:
    generated, path = prepared.generated, prepared.path
    if as_json:
        typer.echo(
            json.dumps(as_object(generated, path, None) | {"text": generated.text}, ensure_ascii=False)
        )
        return
    typer.echo(generated.text, nl=False)
    for note in generated.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"Nothing was written; without --dry-run it goes to {path}", err=True)


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    from buckeye_mcp.tasks.rows import is_written_key

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError("--header: write NAME=VALUE, as --header 'Mcp-Image=my-org/my-env:latest'")
        if is_written_key(name, value):
            raise UsageError(
                f"--header {name}: other users can see flags. Write a variable in single quotes, as "
                f"'{name}=Bearer $MY_KEY'; it is looked up in the environment and in .env"
            )
        found[name.strip()] = value
    return found


def _free_path(output: Path | None, source: Source, *, force: bool) -> Path:
    name = re.sub(r"[^\w.\-]+", "-", source.environment.name).strip("-.") or "env"
    path = output or Path("configs", f"{name}.yaml")
    _refuse_taken(path, force=force)
    return path


def _refuse_taken(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file with -o")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already. Add --force to replace it, or name another file with -o.")
