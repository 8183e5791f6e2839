"""The `mcp` environment: MCP servers, with a task file and a configuration."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from buckeye.base.columns import counted
from buckeye.base.distribution import need
from buckeye.envs.base import START, Outcome, Policy, Task
from buckeye.envs.registry import EnvironmentId, is_file_id
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.config import GymConfig, load_gym_config
from buckeye.mcp.grading.task_graders import check_task_graders
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.tasks.trust import read_taskset
from buckeye.mcp.workdir.server_environment import find_unreachable_files
from buckeye.monitor.verdicts import is_power_of_ten

if TYPE_CHECKING:
    from buckeye.mcp.isolation.probe import IsolationReport

NAME = "mcp"
ADAPTER_NAME = "buckeye-vf-gym"
"""Package that loads this environment in other trainers. Its name is also an id of this environment."""
TRAIN, EVAL = "train", "eval"

log = logging.getLogger(__name__)
_ISOLATION_SECONDS = 20.0


def load_environment(
    dataset: str, config_path: str, eval_dataset: str | None = None, num_tasks: int | None = None
) -> McpEnvironment:
    """Return the environment for the tasks of `dataset` and the configuration file `config_path`.

    `dataset` is a JSON file, a dataset folder, or the name of a dataset on the Hugging Face hub. The split
    `eval` has the tasks of `eval_dataset`. Without `eval_dataset`, the split `eval` has the tasks of
    `dataset` with `"split": "eval"` in their metadata, and the tasks of its test files. The split `train` has
    all other tasks, or the first `num_tasks` of them. Raises UsageError for an invalid file or argument.
    """
    need("mcp", "An MCP environment")
    config = load_gym_config(Path(os.path.expanduser(config_path)))
    tasks, held_out = read_taskset(dataset)
    splits = {TRAIN: tasks, EVAL: held_out}
    if eval_dataset is not None:
        if held_out:
            raise UsageError(
                f"eval_dataset is set, but {dataset} has tasks of the split eval too, as {held_out[0].id!r}",
                code="BK-ENV-ARGUMENT",
                hint=f"remove eval_dataset, or the eval tasks of {dataset}",
            )
        splits[EVAL] = [task for part in read_taskset(eval_dataset) for task in part]
    if num_tasks is not None:
        if not 1 <= num_tasks <= len(tasks):
            raise UsageError(
                f"num_tasks is {num_tasks}, but {dataset} has {counted(len(tasks), 'training task')}",
                code="BK-ENV-ARGUMENT",
                hint=f"set num_tasks to 1 to {len(tasks)}, or remove it",
            )
        splits[TRAIN] = tasks[:num_tasks]
    every_task = [task for tasks in splits.values() for task in tasks]
    datasets = [name for name in (dataset, eval_dataset) if name is not None]
    check_task_graders(every_task, config, Path(config_path), datasets)
    return McpEnvironment(config, {name: tasks for name, tasks in splits.items() if tasks})


def is_mcp(env_id: str) -> bool:
    """Return True if `env_id` is an id of this environment."""
    return not is_file_id(env_id) and canonicalize_name(EnvironmentId.parse(env_id).name) in (
        NAME,
        ADAPTER_NAME,
    )


class McpEnvironment:
    """Environment that runs rollouts against MCP servers. Each rollout opens its own sessions."""

    name = NAME

    def __init__(self, config: GymConfig, splits: Mapping[str, Sequence[McpTask]]) -> None:
        """Raise UsageError for a duplicate task id, missing files, or an action that calls a grading tool."""
        self._config = config
        self._tasks: dict[str, McpTask] = {}
        self._splits = dict(splits)
        self._tasks_by_split: dict[str, list[Task]] = {}
        self._lost_calls: Counter[str] = Counter()
        for tasks in splits.values():
            for task in tasks:
                if task.id in self._tasks:
                    raise UsageError(
                        f"two tasks have the id {task.id!r}",
                        code="BK-ENV-TASKS",
                        hint="give every task in all splits a different id",
                    )
                self._tasks[task.id] = task
        _check_grading_tools(config, self._tasks.values())
        _check_files(config, self._tasks.values())
        _warn_of_unreachable_files(config, self._tasks.values())

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._splits)

    @property
    def offers_tools(self) -> bool:
        """True if the model uses native tool calls, which the chat template must support."""
        return self._config.parser.format == "tools"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Each rollout adds the output of its setup to the prompt.

        Raises KeyError with the names of all splits if `split` is unknown.
        """
        from buckeye.mcp.rollout import first_messages

        if split not in self._splits:
            raise KeyError(
                f"environment {self.name} has no split {split!r}, only {', '.join(self._splits)}. "
                'For a split eval, set "split": "eval" in the metadata of tasks, or set eval_dataset'
            )
        if split not in self._tasks_by_split:
            self._tasks_by_split[split] = [
                Task(
                    id=task.id,
                    messages=tuple(first_messages(task, self._config)),
                    data={START: _hash_start(task), **task.metadata},
                )
                for task in self._splits[split]
            ]
        return self._tasks_by_split[split]

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. If the environment fails, return an outcome with an error and without a reward."""
        from buckeye.mcp.rollout import SERVER_LOST, run_rollout  # the MCP SDK takes a second to import

        try:
            outcome = await run_rollout(self._tasks[task.id], self._config, policy)
            if SERVER_LOST in outcome.explanations:
                self._warn_of_lost_call(outcome.explanations[SERVER_LOST])
            return outcome
        except McpEnvironmentError as fault:
            return Outcome(
                reward=None,
                stop_reason=fault.stop_reason,
                error=f"{type(fault).__name__}: {fault}",
                boundary=fault.boundary,
            )

    def _warn_of_lost_call(self, call: str) -> None:
        """Warn about a call that makes its server fail: at the 1st, 10th, 100th failure, ..."""
        self._lost_calls[call] += 1
        if is_power_of_ten(count := self._lost_calls[call]):
            message = "%s: a call of the model made its server fail (%d rollouts so far): %s"
            log.warning(message, self.name, count, call)

    async def isolation(self, seconds: float) -> IsolationReport:
        """Test if rollouts share state: run some tasks alone, then in parallel, and compare."""
        from buckeye.mcp.isolation.probe import probe_isolation

        return await probe_isolation(next(iter(self._splits.values()), ()), self._config, seconds)

    async def check_tools(self) -> None:
        """Start the servers of some tasks, and check their tools.

        Raises UsageError if a task names a tool that none of its servers has, or an unknown argument of it.
        """
        from buckeye.mcp.rollout_resources import check_servers

        await check_servers([task for tasks in self._splits.values() for task in tasks], self._config)

    async def check_isolation(self) -> str:
        """Test before training if rollouts share state, and return the result as one line.

        Raises UsageError if rollouts share state, or if a task names a tool that none of its servers has. If
        the configuration sets `shared_state`, only check the tools.
        """
        await self.check_tools()
        if self._config.shared_state:
            return "isolation of rollouts not checked: shared_state is true"
        report = await self.isolation(_ISOLATION_SECONDS)
        if report.shared:
            from buckeye.mcp.isolation.probe import shared_state_error

            raise shared_state_error(report)
        return str(report)


def _hash_start(task: McpTask) -> str:
    """Return a short hash of a task's servers, setup and files."""
    start = task.model_dump_json(include={"mcp_config", "setup_tool", "files"})
    return hashlib.sha256(start.encode()).hexdigest()[:16]


def _check_grading_tools(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Raise UsageError if an action calls a tool of evaluate_tool. The model must not grade its own task.

    An action may call a setup tool, because the model may need this tool too, for example to open a page.
    """
    grading_tools = {call.name for task in tasks for call in task.evaluate_tool}
    for action in config.actions.values():
        if action.tool in grading_tools:
            raise UsageError(
                f"the model must not call the tool {action.tool!r}: evaluate_tool grades with it",
                code="BK-MCP-ACTION",
                at=f"action_mappings.{action.name}",
                hint="remove the action",
            )


def _check_files(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Raise UsageError if a task's files do not exist, or if no server of the task can read them.

    Only servers with a `command` can read the rollout's folder. HTTP servers cannot.
    """
    for task in tasks:
        files = task.files or config.files
        if files is not None and not Path(files).exists():
            raise UsageError(
                f"files of task {task.id!r}: no such file or folder: {files}",
                code="BK-FILE-NOT-FOUND",
                hint="correct `files` of the task or the configuration",
            )
        if task.files and not any(isinstance(server, StdioServer) for server in task.mcp_config.values()):
            raise UsageError(
                f"task {task.id!r} has `files`, but its servers are HTTP servers, which cannot read them",
                code="BK-ENV-TASKS",
                hint="remove `files`, or start a server with `command` in mcp_config",
            )


def _warn_of_unreachable_files(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Warn, once per file, about existing files that a server will not find in its rollout's folder."""
    unreachable = {
        path: task.id
        for task in tasks
        if (task.files or config.files) is None
        for server in task.mcp_config.values()
        if isinstance(server, StdioServer)
        for path in find_unreachable_files(server)
    }
    for path, task_id in unreachable.items():
        log.warning(
            "a server of task %s will not find %s, because servers start in the folder of their rollout. Set "
            "`files` in the configuration, and write the path as {workdir}/... If rollouts may share the "
            "file, write its absolute path (docs/explanation/mcp-rollouts.md)",
            task_id,
            path,
        )
