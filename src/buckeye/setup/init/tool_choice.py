"""Choose the tools of an environment for the model, and the parameters of their actions."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.config.problems import closest, did_you_mean
from buckeye.errors import UsageError
from buckeye.mcp.actions.action_schema import DONE, RESERVED_TOOLS
from buckeye.mcp.actions.schema_text import sanitize_text
from buckeye.mcp.tasks.lock_file import ToolEntry

_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_PARAMETER = re.compile(r"[^\W\d][\w.-]*")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ADMINISTRATION = {
    "admin", "administrator", "reset", "restart", "shutdown", "sudo", "debug", "config", "configure",
    "seed",
}  # fmt: skip
_LEAK = {
    "answer", "answers", "solution", "solutions", "grade", "grader", "score", "scores", "reward",
    "rewards", "evaluate", "evaluation", "groundtruth", "truth", "expected", "oracle", "verifier",
    "verify",
}  # fmt: skip
_DESTRUCTION = {"delete", "drop", "destroy", "wipe", "purge", "truncate"}
_POWER = {"shell", "bash", "exec", "eval", "terminal", "subprocess"}
_RUN, _COMMAND = {"run", "execute"}, {"command", "commands"}
_DESCRIPTION = re.compile(
    r"\b(admin(?:istrator|istrative)?s?(?: only)?|for debugging|debug only|ground.truth|"
    r"(?:correct|right|expected|hidden) answers?|the solution|"
    r"resets? the (?:environment|game|state|episode|task|world)|irreversibl[ey]|"
    r"(?:arbitrary|shell) commands?|grad(?:es?|ing) the|the (?:reward|grade)|internal use)\b",
    re.I,
)
_CONTEXT = re.compile(
    r"(?:.*_)?(?:session|project|workspace|tenant|account|context|repo|repository|environment|env|game|world|"
    r"instance)(?:_?(?:id|path|dir|name|root|key))?|(?:base_|root_|working_|repo_)?(?:path|dir|directory|folder)|cwd|root|"
    r"namespace|database|db|db_path|database_path",
    re.I,
)
PATH_NAME = re.compile(
    r"(?:^|_|\b)(?:path|file|filepath|filename|dir|directory|folder|root|repo|repository)(?:$|_)", re.I
)
"""Matches argument names that denote a path in a folder."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument: its `name` in the tool, its `argument_name` in the action, and its JSON Schema."""

    name: str
    argument_name: str
    schema: Mapping[str, Any]
    required: bool


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """An action for a tool.

    `parameters` are in positional order: required parameters first. `dropped` names the arguments of the tool
    that no action can provide.
    """

    name: str
    tool: ToolEntry
    parameters: tuple[Parameter, ...]
    dropped: tuple[str, ...] = ()

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the tool's arguments."""
        return self.tool.input_schema or {}


@dataclass(frozen=True, slots=True)
class FlaggedAction:
    """An action that a person should approve first."""

    action: PlannedAction
    reason: str


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """Actions planned for the tools.

    `context` has the arguments with a fixed value. It maps the name of each argument to the value that the
    argument has in all calls. `left_out` has the reason for each tool without an action.
    """

    actions: tuple[PlannedAction, ...]
    flagged: tuple[FlaggedAction, ...]
    context: Mapping[str, str | int]
    left_out: Mapping[str, str]


def choose_tools(
    tools: Sequence[ToolEntry], include: Sequence[str], exclude: Sequence[str]
) -> list[ToolEntry]:
    """Return the tools that match a pattern of `include` and no pattern of `exclude`.

    An empty `include` matches all tools. Raises UsageError if a pattern matches no tool, or no tool is left.
    """
    names = [tool.name for tool in tools]
    for flag, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(_matches(name, [pattern]) for name in names):
                all_names = f"Use one of: {', '.join(map(sanitize_text, names))}"
                hint = did_you_mean(closest(pattern, names)).strip() or all_names
                raise UsageError(f"{flag}: no tool matches {pattern!r}", code="BK-CLI-ARGUMENT", hint=hint)
    chosen = [tool for tool in tools if not include or _matches(tool.name, include)]
    chosen = [tool for tool in chosen if not _matches(tool.name, exclude)]
    if not chosen:
        message = "no tool is left after --include and --exclude"
        raise UsageError(message, code="BK-CLI-CONFLICT", hint="Exclude fewer tools")
    return chosen


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return name in patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def plan_actions(
    tools: Sequence[ToolEntry],
    *,
    setup_tools: Collection[str] = (),
    grading_tools: Collection[str] = (),
    requested: Sequence[str] = (),
    private: bool = False,
    values: Mapping[str, str | int] | None = None,
    workdir_path: str | None = None,
) -> ActionPlan:
    """Return the plan for these tools.

    Tasks use the tools `setup_tools` for setup and `grading_tools` for grading. `requested` has names or
    patterns of tools that the user requested; these tools are never flagged. Destructive tools are not
    flagged if the files are `private` to a rollout. An argument is constant if every action requires it and
    its name denotes a location. Its constant value is in `values`, which maps names of arguments to values,
    or is `workdir_path`: if the command line names a single path, its path in the copy for a rollout.
    """
    actions: list[PlannedAction] = []
    flagged: list[FlaggedAction] = []
    left_out: dict[str, str] = {}
    taken = {DONE}
    for tool in tools:
        if tool.name.rpartition("/")[2] in RESERVED_TOOLS or tool.name in grading_tools:
            left_out[tool.name] = "reserved for setup and grading"
            continue
        action = _plan_action(tool, taken)
        taken.add(action.name)
        if impossible := [name for name in action.dropped if name in _required(tool)]:
            left_out[tool.name] = f"the name of its required argument {impossible[0]!r} is not supported"
        elif _matches(tool.name, requested):
            actions.append(action)
        elif tool.name in setup_tools:
            flagged.append(FlaggedAction(action, "tasks use it for setup"))
        elif reason := why_flagged(tool, private=private):
            flagged.append(FlaggedAction(action, reason))
        else:
            actions.append(action)
    return ActionPlan(
        tuple(actions), tuple(flagged), _common_arguments(actions, values or {}, workdir_path), left_out
    )


def has_hint(tool: ToolEntry, hint: str) -> bool:
    """Return True if a tool announces this hint, such as `destructiveHint`."""
    snake = _WORD.sub(lambda part: f"_{part[0].lower()}", hint).lstrip("_")
    return any(tool.annotations.get(name) is True for name in (hint, snake))


def why_flagged(tool: ToolEntry, *, private: bool = False) -> str:
    """Return the reason why a person should approve a tool before the model gets it, or ""."""
    words = {word.lower() for word in _WORD.findall(tool.name)} | {tool.name.lower().replace("_", "")}
    power = _POWER | _COMMAND if words & _RUN else _POWER
    kinds = (
        (_LEAK, "may show the model the answer or the reward"),
        (_ADMINISTRATION, "may administer the environment"),
        (set[str]() if private else _DESTRUCTION, "may delete data"),
        (power, "runs commands, and may access the grading"),
    )
    for vocabulary, risk in kinds:
        if risky := sorted(words & vocabulary):
            return f'"{risky[0]}" in its name: it {risk}'
    if has_hint(tool, "destructiveHint") and not private:
        return "announces destructiveHint"
    match = _DESCRIPTION.search(tool.description)
    return f'"{" ".join(match[0].split())}" in its description' if match is not None else ""


def _plan_action(tool: ToolEntry, taken: Collection[str]) -> PlannedAction:
    properties = (tool.input_schema or {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = _required(tool)
    ordered = sorted(map(str, properties), key=lambda name: name not in required)  # a stable sort
    parameters: list[Parameter] = []
    for name in ordered:
        if not name or name.startswith("_"):
            continue
        taken_names = [parameter.argument_name for parameter in parameters]
        argument_name = _unique_name(_callable_name(name, _PARAMETER), taken_names)
        schema = properties[name] if isinstance(properties[name], Mapping) else {}
        parameters.append(Parameter(name, argument_name, schema, name in required))
    return PlannedAction(
        name=_unique_name(_callable_name(tool.name, _NAME), taken),
        tool=tool,
        parameters=tuple(parameters),
        dropped=tuple(name for name in ordered if not name or name.startswith("_")),
    )


def _required(tool: ToolEntry) -> list[str]:
    required = (tool.input_schema or {}).get("required")
    return [str(name) for name in required] if isinstance(required, list) else []


def _callable_name(name: str, pattern: re.Pattern[str]) -> str:
    """Return the name, or a similar name that a call can contain."""
    if pattern.fullmatch(name):
        return name
    replaced = re.sub(r"[^\w.\-]+", "_", name).strip("_") or "tool"
    return replaced if pattern.fullmatch(replaced) else f"n_{replaced}"


def _unique_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def _common_arguments(
    actions: Sequence[PlannedAction], values: Mapping[str, str | int], workdir_path: str | None
) -> dict[str, str | int]:
    required = [{p.name for p in action.parameters if p.required} for action in actions]
    if len(actions) < 3:
        return {}
    common = {}
    for name in sorted(set.intersection(*required)):
        value = values.get(name, workdir_path if PATH_NAME.search(name) else None)
        if value is not None and _CONTEXT.fullmatch(name):
            common[name] = value
    return common
