"""Load reward functions from files and modules, and pass the arguments that their parameters name."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from buckeye.base.threads import run_in_daemon_thread
from buckeye.base.user_function import import_file
from buckeye.config.problems import closest, closest_file, suggestion
from buckeye.dataset.prompt_tasks import Columns
from buckeye.dataset.rows import raise_problems, row_error
from buckeye.envs.base import Policy, Task
from buckeye.envs.registry import report_import_errors
from buckeye.envs.stdlib_only.outcomes import OutcomeError, location_of_code, to_finite_float
from buckeye.errors import UsageError
from buckeye.mcp.grading.judge import GraderVerdict

_SINGLE = ("prompt", "completion")
_BATCH = ("prompts", "completions")
_TOKENS = "completion_ids"
_ANSWER = "answer"
_OTHER_NAMES = ("reply", "response", "output", "generation", "prediction", "text")
"""Names of the completion elsewhere."""
_USUAL_NAMES = ("reward", "reward_fn", "reward_func", "score")
_SECONDS = 300.0
_EXPECTED = (
    "write `def reward(prompt, completion, **row)` for one reply, or `def reward(prompts, completions, "
    "**columns)` for the replies of a group"
)


@dataclass(frozen=True, slots=True)
class Completion:
    """Reply to score. `text` omits the reasoning if the chat template separates reasoning from the answer."""

    text: str
    message: Mapping[str, Any]
    token_ids: Sequence[int] | None = None
    """None if unknown: in worker processes, and for models of other servers."""
    truncated: bool = False
    policy: Policy | None = None
    """Policy that replied. None if it has ended, as when a group or a recorded reply is scored."""


class Reward(Protocol):
    """Object that scores replies to a task."""

    name: str
    needs_group: bool
    """True if the replies of a group are scored together."""

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return a finite score for each reply. Raises OutcomeError for any other value."""
        ...

    def answers_in(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the right answers of a row: one as `answer` or several as `accept`; empty if unknown."""
        ...


class FunctionReward:
    """Reward function of the user.

    With a parameter `prompt` or `completion` it scores one reply. With `prompts` or `completions` it scores
    all replies of a group in one call. `answer` is the column of answers. Every other parameter is a column
    of the dataset. A function that is not async runs in a thread, one call at a time.
    """

    def __init__(self, function: Callable[..., Any], columns: Columns, tasks: Iterable[Task]) -> None:
        """Raises UsageError if a required parameter is neither part of the reply nor a column of each task.

        A parameter with a default may be missing.
        """
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        self._code = getattr(inspect.unwrap(function), "__code__", None)
        self._where = location_of_code(self._code)
        self._answer_column = columns.answer
        known = dict.fromkeys([*columns.others, _ANSWER] if columns.answer is not None else columns.others)
        parameters = self._parameters(known)
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._takes_all = len(names) < len(parameters)
        self.needs_group = not any(name in names for name in _SINGLE)
        self._names = set(names)
        self._needs_tokens = any(p.name == _TOKENS and p.default is p.empty for p in parameters)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._check_tasks(tasks, [p.name for p in parameters if p.name in known and _is_required(p)])

    def _check_tasks(self, tasks: Iterable[Task], required: Sequence[str]) -> None:
        problems = []
        for task in tasks if required else ():
            row = self._row(task)
            missing = [name for name in required if row[name] is None]
            if missing:
                message = f"no `{missing[0]}`, which the reward function `{self.name}` needs"
                hint = f"remove the row, or give the parameter a default: `{missing[0]}=None`"
                problems.append(row_error(message, task.data["at"], hint))
        raise_problems(problems, "the dataset")

    def _row(self, task: Task) -> dict[str, Any]:
        """Return the columns of a task, with the answer under the name of its parameter."""
        row: dict[str, Any] = task.data["row"]
        if _ANSWER in self._names and self._answer_column is not None:
            return {**row, _ANSWER: row[self._answer_column]}
        return row

    def _parameters(self, columns: Collection[str]) -> list[inspect.Parameter]:
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):
            raise self._error("its parameters cannot be read", _EXPECTED) from None
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise self._error(f"`{parameter.name}` can only be passed by position", _EXPECTED)
        parameters = [p for p in parameters if p.name != "self"]
        names = {p.name for p in parameters}
        if names & set(_SINGLE) and names & set(_BATCH):
            raise self._error("it has parameters for one reply and for several", _EXPECTED)
        if not names & {*_SINGLE, *_BATCH, _TOKENS} and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise self._error("it has no parameter for the reply", _rename_hint(names) or _EXPECTED)
        known = {*_SINGLE, *_BATCH, _TOKENS, *columns}
        for parameter in parameters:
            if _is_required(parameter) and parameter.name not in known:
                near = _rename_hint(names) or suggestion(closest(parameter.name, known, count=1))
                raise self._error(
                    f"`{parameter.name}` is neither a column of the dataset nor `prompt` or `completion`",
                    near or _column_hint(parameter.name, columns),
                )
        return parameters

    def _error(self, message: str, hint: str) -> UsageError:
        at = None if self._code is None else f"{self._code.co_filename}:{self._code.co_firstlineno}"
        return UsageError(f"reward function `{self.name}`: {message}", code="BK-REWARD", at=at, hint=hint)

    def answers_in(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of a row, if the code of the function names the column of answers."""
        column = self._answer_column
        constants = self._code.co_consts if self._takes_all and self._code is not None else ()
        if column is None or not {_ANSWER, column} & {*self._names, *filter(_is_text, constants)}:
            return {}
        return {_ANSWER: row.get(column)}

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return a finite score for each reply.

        Raises OutcomeError for any other value, and the exceptions of the function.
        """
        if self.needs_group:
            values = await self._call(self._batch_arguments(task, completions))
            return self._verdicts(values, len(completions))
        values = [await self._call(self._arguments(task, completion)) for completion in completions]
        return self._verdicts(values, len(completions))

    def _arguments(self, task: Task, completion: Completion) -> dict[str, Any]:
        known = {**deepcopy(self._row(task)), "prompt": _prompt(task), "completion": completion.text}
        if completion.token_ids is not None:
            known[_TOKENS] = list(completion.token_ids)
        return self._accepted(known)

    def _batch_arguments(self, task: Task, completions: Sequence[Completion]) -> dict[str, Any]:
        count, is_text = len(completions), task.data["is_text"]
        row = deepcopy(self._row(task))  # a function may change its arguments
        known: dict[str, Any] = {name: [value] * count for name, value in row.items()}
        known["prompts"] = [_prompt(task) for _ in completions]
        known["completions"] = [c.text if is_text else [dict(c.message)] for c in completions]
        tokens = [c.token_ids for c in completions]
        if None not in tokens:
            known[_TOKENS] = [list(ids) for ids in tokens if ids is not None]
        return self._accepted(known)

    def _accepted(self, known: dict[str, Any]) -> dict[str, Any]:
        if self._needs_tokens and _TOKENS not in known:
            raise OutcomeError(
                f"`{self.name}`{self._where} needs `{_TOKENS}`, which are unknown in a worker process and "
                "for a model of another server: use the completion instead"
            )
        return known if self._takes_all else {name: known[name] for name in self._names if name in known}

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._in_time(self._function(**arguments))
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            value = await self._in_time(run_in_daemon_thread(partial(self._function, **arguments)))
        return await self._in_time(value) if inspect.isawaitable(value) else value

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        """Return the result of `work`. Raises OutcomeError after the time limit."""
        try:
            async with asyncio.timeout(_SECONDS) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise OutcomeError(f"`{self.name}`{self._where} took more than {_SECONDS:g} s") from None

    def _verdicts(self, values: Any, count: int) -> list[GraderVerdict]:
        if inspect.isawaitable(values):
            # raises OutcomeError: the function did not await its result
            to_finite_float(values, f"the reward of `{self.name}`")
        if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
            raise OutcomeError(
                f"`{self.name}`{self._where} returned {str(values)[:80]!r}, not a list of {count} numbers"
            )
        if len(values) != count:
            raise OutcomeError(
                f"`{self.name}`{self._where} returned {len(values)} numbers for {count} replies"
            )
        try:
            numbers = [to_finite_float(value, f"the reward of `{self.name}`") for value in values]
        except OutcomeError as error:
            raise OutcomeError(f"{error}{self._where}") from None
        return [GraderVerdict(number, "") for number in numbers]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD


def _column_hint(name: str, columns: Collection[str]) -> str:
    shown = f"columns: {', '.join(columns) or 'none'}"
    if name == _ANSWER:
        return f"name the column of the answers with --answer-column ({shown})"
    return f"{shown}. Or give it a default"


def _rename_hint(parameters: Collection[str]) -> str | None:
    """Return a hint if a parameter has a name of the completion elsewhere, such as `response`."""
    for name in parameters:
        if name in _OTHER_NAMES:
            return f"call the reply `completion`, not `{name}`"
        if name == "replies" or name.removesuffix("s") in _OTHER_NAMES:
            return f"call the replies `completions`, not `{name}`"
    return None


def _prompt(task: Task) -> Any:
    """Return the prompt in the form of the dataset: a text, or a list of messages."""
    return task.messages[0]["content"] if task.data["is_text"] else [dict(m) for m in task.messages]


def load_function(spec: str) -> Callable[..., Any]:
    """Return the function that `FILE.py`, `FILE.py:NAME` or `MODULE:NAME` names. Raises UsageError."""
    place, _, name = spec.partition(".py:") if ".py:" in spec else (spec.removesuffix(".py"), "", "")
    if spec.endswith(".py") or ".py:" in spec:
        path = Path(os.path.expanduser(f"{place}.py"))
        module, where = _import_path(path), str(path)
    else:
        where, _, name = spec.partition(":")
        with report_import_errors(f"the reward {spec}"):
            module = importlib.import_module(where)
    if not name:
        return _only_function(module, where)
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)  # type: ignore[assignment]
    if callable(function):
        return function
    hint = suggestion(closest(name, _public_functions(module), count=1))
    message = (
        f"{where} has no function `{name}`" if function is None else f"`{name}` in {where} is not a function"
    )
    raise UsageError(message, code="BK-REWARD", hint=hint or _EXPECTED)


def _import_path(path: Path) -> ModuleType:
    if not path.is_file():
        near = closest_file(path, path.parent.glob("*.py"))
        hint = near or f"check the path; the working directory is {Path.cwd()}"
        raise UsageError(f"no reward file {path}", code="BK-FILE-NOT-FOUND", hint=hint)
    with report_import_errors(f"the reward file {path}", path.parent):
        return import_file(path)


def _public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and getattr(value, "__module__", None) == module.__name__
    }


def _only_function(module: ModuleType, where: str) -> Callable[..., Any]:
    """Return the only public function of a module, or the function with a usual name such as `reward`."""
    functions = _public_functions(module)
    usual = [name for name in _USUAL_NAMES if name in functions]
    if len(functions) == 1 or usual:
        return functions[usual[0]] if usual else next(iter(functions.values()))
    if not functions:
        raise UsageError(f"{where} defines no function", code="BK-REWARD", hint=_EXPECTED)
    raise UsageError(
        f"{where} defines several functions: {', '.join(functions)}",
        code="BK-REWARD",
        hint=f"name the function: {where}:{next(iter(functions))}",
    )
