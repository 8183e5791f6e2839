"""Adapter for any program or function that calls a model through OpenAI's or Anthropic's API.

Arguments: `command` (a list) or `callable` ("module:function"), `tasks` and optionally `eval_tasks` (JSON
Lines: `id`, `prompt` or `messages`, other fields), `reward` ("module:function"), `env`, `cwd`, `timeout`.

A program finds the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, the
model's name in BUCKEYE_MODEL and its task in the file BUCKEYE_TASK. It must exit with status 0. Its reward is
the result of the function `reward(task, result)`. Without this function, its reward is the `reward` of the
JSON object that the program writes to the file BUCKEYE_RESULT or prints as its last line.

Buckeye calls `callable` with `(task, endpoint)`. The function returns a reward, an object with the key
`reward`, or the `result` that the function `reward` scores.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..outcomes import OutcomeError, location_of_code, number_error_text, to_finite_float
from .agent_tasks import read_tasks
from .base import (
    Adapter,
    AdapterError,
    Json,
    check_arguments,
    errors_as,
    existing_file,
    failed,
    raised,
    scored,
)
from .programs import ProgramResult, run_program

ID = "agent"
ARGUMENTS = ("command", "callable", "tasks", "eval_tasks", "reward", "env", "cwd", "timeout")
RESULT_KEYS = ("reward", "components", "stop_reason")
DEFAULT_TIMEOUT = 3600.0
_THREADS = 256


class Agent(Adapter):
    """One program or function, and its tasks."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, ARGUMENTS)
        if ("command" in args) == ("callable" in args):
            raise AdapterError(
                'agent needs either `command = ["python", "my_agent.py"]` or `callable = "module:function"`'
            )
        self._cwd = _check_folder(args.get("cwd"))
        self._command = _command(args["command"]) if "command" in args else None
        self._function = self._import_argument("callable", args.get("callable"))
        self._reward = self._import_argument("reward", args.get("reward"))
        self._environ = _environ(args.get("env", {}))
        self._timeout = float(args.get("timeout", DEFAULT_TIMEOUT))
        if "tasks" not in args:
            raise AdapterError('agent needs `tasks`, such as `tasks = "tasks.jsonl"`')
        files = {"train": args["tasks"], **({"eval": args["eval_tasks"]} if "eval_tasks" in args else {})}
        self._tasks = {split: read_tasks(existing_file(path, "tasks")) for split, path in files.items()}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agent")

    def _import_argument(self, argument: str, reference: str | None) -> Callable[..., Any] | None:
        return None if reference is None else import_function(argument, reference, folder=self._cwd)

    def info(self) -> Json:
        return {
            "name": ID,
            "splits": list(self._tasks),
        }

    def tasks(self, split: str) -> Iterator[Json]:
        return iter(self._tasks[split])

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        result: Any
        timeout = min(self._timeout, float(context.get("deadline") or self._timeout))
        if self._function is not None:
            try:
                result = await asyncio.wait_for(self._call(self._function, task, endpoint), timeout)
            except asyncio.TimeoutError as error:  # noqa: UP041  another class in Python 3.10
                message = str(error) or f"the function did not end within {timeout:g} s"
                return failed("agent", "Timeout", message)
            except Exception as error:
                return raised("agent", error)
        else:
            with tempfile.TemporaryDirectory(prefix="buckeye-agent-") as folder:
                outcome = await self._run(Path(folder), task, endpoint, timeout)
                if "error" in outcome:
                    return outcome
                result = outcome["result"]
        if self._reward is not None:
            try:
                result = await self._call(self._reward, task, result)
            except Exception as error:
                return raised("score", error)
        return to_outcome(result, self._reward or self._function)

    async def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function, in a thread unless it is asynchronous.

        A thread cannot be killed, so a cancelled call waits until the function returns.
        """
        if inspect.iscoroutinefunction(function):
            return await function(*given)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, lambda: function(*given))
        try:
            answer = await asyncio.shield(running)
            return await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    async def _run(self, folder: Path, task: Json, endpoint: Json, timeout: float) -> Json:
        """Run the program, and return `{"result": ...}` or a failed outcome."""
        assert self._command is not None
        (folder / "task.json").write_text(json.dumps(task, ensure_ascii=False), "utf-8")
        environ = {**os.environ, **self._environ, **endpoint_variables(endpoint)}
        environ |= {"BUCKEYE_TASK": str(folder / "task.json"), "BUCKEYE_RESULT": str(folder / "result.json")}
        try:
            program = await run_program(self._command, environ=environ, cwd=self._cwd, timeout=timeout)
        except OSError as error:
            return failed("agent", type(error).__name__, f"cannot start {self._command[0]}: {error}")
        if program.status is None:
            message = f"the program did not end within {timeout:g} s; last output:\n{program.last_lines()}"
            return failed("agent", "Timeout", message)
        if program.status != 0:
            message = f"the program exited with status {program.status}; last output:\n{program.last_lines()}"
            return failed("agent", "ExitStatus", message)
        try:
            has_reward_function = self._reward is not None
            return {"result": _read_result(folder / "result.json", program, has_reward_function)}
        except ValueError as error:
            return failed("agent", "NoReward", f"{error}; last output:\n{program.last_lines(3)}")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def endpoint_variables(endpoint: Json) -> dict[str, str]:
    """Return the environment variables that OpenAI's and Anthropic's clients read, and BUCKEYE_MODEL."""
    return {
        "OPENAI_BASE_URL": endpoint["base_url"],
        "OPENAI_API_KEY": endpoint["api_key"],
        "ANTHROPIC_BASE_URL": endpoint["root_url"],
        "ANTHROPIC_API_KEY": endpoint["api_key"],
        "BUCKEYE_MODEL": endpoint["model"],
    }


def to_outcome(result: Any, function: Callable[..., Any] | None = None) -> Json:
    """Return the outcome for the result of an agent or a reward function.

    The result is a number, or an object with `reward` and optionally `components` and `stop_reason`.
    `function` is the function that returned the result; None for a program.
    """
    given = result if isinstance(result, dict) else {"reward": result}
    reward, components = given.get("reward"), given.get("components", {})
    try:
        if isinstance(reward, bool):
            raise OutcomeError(number_error_text(reward, "the reward"))
        reward = to_finite_float(reward, "the reward")
    except OutcomeError as error:
        location = location_of_code(getattr(function, "__code__", None))
        return failed("score", "NoReward", f"{error}{location}")
    unknown = sorted(set(given) - set(RESULT_KEYS))
    if unknown:
        return failed("score", "UnknownKey", f"unknown key {unknown[0]!r}, expected {', '.join(RESULT_KEYS)}")
    if not isinstance(components, dict):
        return failed("score", "NoComponents", "components must be an object of numbers")
    return scored(reward, components=components, stop_reason=str(given.get("stop_reason", "done")))


def import_function(argument: str, reference: str, *, folder: str | None) -> Callable[..., Any]:
    """Return the function `module:function` or `file.py:function`. Raises AdapterError.

    `folder` (None: the current folder) becomes the first entry of `sys.path`.
    """
    module_name, colon, name = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    if not colon or not module_name or not name:
        raise AdapterError(f'{argument} must be "module:function" or "file.py:function", not {reference!r}')
    root = folder or os.getcwd()
    if root not in sys.path:
        sys.path.insert(0, root)
    with errors_as(f"cannot import {argument} = {reference!r}"):
        module = _file_module(Path(root, module_name)) if module_name.endswith(".py") else None
        module = module or importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise AdapterError(f"{argument} = {reference!r}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]


def _file_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"buckeye_local_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _read_result(path: Path, program: ProgramResult, has_reward_function: bool) -> Any:
    """Return the program's result: the JSON object in its result file, or else in its last line of output.

    With a reward function, return this object as `result`, and the whole output as `stdout`. Without a reward
    function, raise ValueError if the object has no `reward`.
    """
    text = path.read_text("utf-8") if path.exists() else program.stdout.strip().rpartition("\n")[2]
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if has_reward_function:
        return {"result": parsed, "stdout": program.stdout}
    if not isinstance(parsed, dict) or "reward" not in parsed:
        raise ValueError('the program wrote no {"reward": ...} to BUCKEYE_RESULT or as its last line')
    return parsed


def _command(given: Any) -> list[str]:
    if not isinstance(given, list) or not given or not all(isinstance(part, str) for part in given):
        raise AdapterError(f'command must be a list like ["python", "my_agent.py"], not {given!r}')
    return given


def _environ(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise AdapterError('env must be a table of strings, such as { MODE = "fast" }')
    return dict(given)


def _check_folder(given: Any) -> str | None:
    if given is None:
        return None
    path = Path(os.path.expanduser(str(given))).resolve()
    if not path.is_dir():
        raise AdapterError(f"cwd = {given!r}: the folder does not exist")
    return str(path)
