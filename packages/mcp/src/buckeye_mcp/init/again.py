"""`buckeye rl init --again FILE`: a configuration that somebody has edited, tried as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from buckeye.errors import UsageError
from buckeye_mcp.config import GymConfig, load_gym_config
from buckeye_mcp.init.generate import SERVER
from buckeye_mcp.init.prepare import proof_of, read_tasks, tools_of
from buckeye_mcp.init.scripted_rollout import Proof
from buckeye_mcp.init.source import Source, find_source, of_server, of_tasks, with_others
from buckeye_mcp.init.texts import proof_object, trials_text
from buckeye_mcp.init.trial import with_copies
from buckeye_mcp.tasks.task_schema import Server


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What a configuration is worth now: `missing` are tools that it maps and nobody has, `unused` those that
    are there and not mapped."""

    path: Path
    proof: Proof
    shown: str
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """For people."""
        lines = [f"note: {note}" for note in self.notes]
        if self.missing:
            lines.append(f"mapped, and not there any more: {', '.join(self.missing)}")
        if self.unused:
            lines.append(f"there, and not mapped: {', '.join(self.unused)}")
        return "\n".join([*lines, trials_text(self.proof, self.shown), f"{self.path} is as it was."])

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        return {
            "config": str(self.path),
            "missing": list(self.missing),
            "unused": list(self.unused),
            "notes": list(self.notes),
            "proof": proof_object(self.proof),
        }


def try_again(
    path: Path,
    env: str | None,
    *,
    command: str | None,
    headers: Mapping[str, str],
    tasks: Path | None,
    try_all: bool,
) -> Tried:
    """Play the scripted rollout with a configuration, on what was named, or on what it was made from. Raises
    UsageError, and McpFault where the environment does not start."""
    config = load_gym_config(path)
    known = read_tasks(tasks) if tasks is not None else []
    if env is not None or command is not None:
        source = find_source(env, command=command, headers=headers, build=False)
    elif (noted := _noted(path, config)) is not None:
        source = noted
    elif known:
        source = of_tasks(known)
    else:
        raise UsageError(
            f"{path} does not say which environment it is for (job.metadata.{SERVER}): name it, as "
            f'`buckeye rl init --again {path} ENV` or `--command "..."`'
        )
    apart = with_copies(with_others(source, known))
    listed = tools_of(apart)
    names = {tool.name for tool in listed}
    mapped = {action.tool for action in config.actions.values() if action.tool is not None}
    proof = proof_of(config, listed, apart, known[0] if known else None, try_all=try_all)
    return Tried(
        path=path,
        proof=proof,
        shown=source.shown,
        missing=tuple(sorted(mapped - names)),
        unused=tuple(sorted(names - mapped)),
        notes=apart.notes,
    )


def _noted(path: Path, config: GymConfig) -> Source | None:
    """The server that the file says it was made from."""
    given = config.job.metadata.get(SERVER)
    if given is None:
        return None
    try:
        return of_server(TypeAdapter[Any](Server).validate_python(given))
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise UsageError(f"{path}: job.metadata.{SERVER}: {reason}") from None
