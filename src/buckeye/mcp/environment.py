"""The `mcp` environment: MCP servers, with a task file and a configuration."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from buckeye.base.distribution import need
from buckeye.envs.base import START, Outcome, Policy, Task
from buckeye.envs.registry import EnvironmentId, is_file_id, renamed_arguments
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
FORMER_NAME = "buckeye-vf-gym"
"""Former id of this environment. Configurations with it still run."""
FORMER_ARGUMENTS = {"taskset": "dataset", "eval_taskset": "eval_dataset"}
"""Current name of each former argument. Both names are accepted."""
TRAIN, EVAL = "train", "eval"

log = logging.getLogger(__name__)
_ISOLATION_SECONDS = 20.0


@renamed_arguments(FORMER_ARGUMENTS)
def load_environment(
    dataset: str, config_path: str, eval_dataset: str | None = None, num_tasks: int | None = None
) -> McpEnvironment:
    """Return the environment for `dataset` and the configuration file `config_path`.

    `dataset` is a JSON file, a dataset folder, or the name of a dataset on the Hugging Face hub. The split
    `eval` is `eval_dataset` if given. Otherwise it has the tasks whose metadata has `"split": "eval"` and
    those of the dataset's test files. All other tasks are the split `train`; `num_tasks` keeps its first
    tasks only. Raises UsageError.
    """
    need("mcp", "An MCP environment")
    config = load_gym_config(Path(config_path).expanduser())
    tasks, held_out = read_taskset(dataset)
    splits = {TRAIN: tasks, EVAL: held_out}
    if eval_dataset is not None:
        if held_out:
            raise UsageError(
                f"eval_dataset is given, and {held_out[0].id!r} in {dataset} has the split eval too: "
                "have one of them"
            )
        splits[EVAL] = [task for each in read_taskset(eval_dataset) for task in each]
    if num_tasks is not None:
        if not 1 <= num_tasks <= len(tasks):
            raise UsageError(f"num_tasks is {num_tasks}, and {dataset} has {len(tasks)} tasks to train on")
        splits[TRAIN] = tasks[:num_tasks]
    check_task_graders((task for tasks in splits.values() for task in tasks), config)
    return McpEnvironment(config, {name: tasks for name, tasks in splits.items() if tasks})


def is_mcp(env_id: str) -> bool:
    """Return True if an id names this environment, by its current or its former name."""
    return not is_file_id(env_id) and canonicalize_name(EnvironmentId.parse(env_id).name) in (
        NAME,
        FORMER_NAME,
    )


class McpEnvironment:
    """Environment that runs rollouts against MCP servers. Each rollout has its own sessions."""

    def __init__(
        self, config: GymConfig, splits: Mapping[str, Sequence[McpTask]], *, name: str = NAME
    ) -> None:
        """Raises UsageError for a duplicate task id, and for an action whose tool also grades."""
        self.name = name
        self._config = config
        self._tasks: dict[str, McpTask] = {}
        self._splits = dict(splits)
        self._made: dict[str, list[Task]] = {}
        self._lost: Counter[str] = Counter()
        for tasks in splits.values():
            for task in tasks:
                if task.id in self._tasks:
                    raise UsageError(f"two tasks have the id {task.id!r}")
                self._tasks[task.id] = task
        _check_reach(config, self._tasks.values())
        _check_files(config, self._tasks.values())
        _tell_left_behind(config, self._tasks.values())

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._splits)

    @property
    def offers_tools(self) -> bool:
        """True if the model uses native tool calls, which the chat template must support."""
        return self._config.parser.format == "tools"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Setup output is not in these prompts: each rollout adds its own.

        Raises KeyError that names the available splits.
        """
        from buckeye.mcp.rollout import first_messages

        if split not in self._splits:
            raise KeyError(
                f"{self.name} has no split {split!r}; it has {', '.join(self._splits)}. Tasks are in the "
                'split eval if their metadata has "split": "eval", or in a file of their own, eval_dataset'
            )
        if split not in self._made:
            self._made[split] = [
                Task(
                    id=task.id,
                    messages=tuple(first_messages(task, self._config)),
                    data={START: _start(task), **task.metadata},
                )
                for task in self._splits[split]
            ]
        return self._made[split]

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. A failure of the environment gives an outcome with an error."""
        from buckeye.mcp.rollout import SERVER_LOST, run_rollout  # importing the SDK takes a second

        try:
            outcome = await run_rollout(self._tasks[task.id], self._config, policy)
            if SERVER_LOST in outcome.explanations:
                self._tell(outcome.explanations[SERVER_LOST])
            return outcome
        except McpEnvironmentError as fault:
            return Outcome(
                reward=None,
                stop_reason=fault.stop_reason,
                error=f"{type(fault).__name__}: {fault}",
                boundary="task" if fault.final else None,
            )

    def _tell(self, lost: str) -> None:
        """Warn of calls that break a server: the first time, and at each power of ten."""
        self._lost[lost] += 1
        if is_power_of_ten(count := self._lost[lost]):
            said = "%s: a call of the model broke its server, in %d rollouts until now: %s"
            log.warning(said, self.name, count, lost)

    async def isolation(self, seconds: float) -> IsolationReport:
        """Test if rollouts share state: run some tasks alone, then in parallel, and compare."""
        from buckeye.mcp.isolation.probe import probe_isolation

        return await probe_isolation(next(iter(self._splits.values()), ()), self._config, seconds)

    async def check_isolation(self) -> str:
        """Test before training if rollouts share state, and return the result as one line.

        Raises UsageError if they do, or if a task names a tool that none of its servers has. With
        `shared_state` only the tools are checked.
        """
        from buckeye.mcp.rollout_resources import check_servers

        await check_servers([task for tasks in self._splits.values() for task in tasks], self._config)
        if self._config.shared_state:
            return "shared_state is set: whether rollouts see each other is not looked at"
        found = await self.isolation(_ISOLATION_SECONDS)
        if found.shared:
            from buckeye.mcp.isolation.probe import shared_state_error

            raise shared_state_error(found)
        return str(found)


def _start(task: McpTask) -> str:
    """Return a short hash of a task's servers, setup and files."""
    start = task.model_dump_json(include={"mcp_config", "setup_tool", "files"})
    return hashlib.sha256(start.encode()).hexdigest()[:16]


def _check_reach(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Raise UsageError if an action reaches a tool of evaluate_tool: the model must not grade its own task.

    Setup tools are allowed, because the model may need them too, for example to open a page.
    """
    grading = {call.name for task in tasks for call in task.evaluate_tool}
    for action in config.actions.values():
        if action.tool in grading:
            raise UsageError(
                f"action_mappings.{action.name}: the model may not call the tool {action.tool!r}, which is "
                "for evaluate_tool. Remove the action"
            )


def _check_files(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Raise UsageError if a task's files do not exist, or if no server of the task can see them.

    Only servers that are started as a command see the rollout's folder.
    """
    for task in tasks:
        files = task.files or config.files
        if files is not None and not Path(files).exists():
            raise UsageError(f"files of task {task.id!r}: there is no file or folder {files}")
        if task.files and not any(isinstance(one, StdioServer) for one in task.mcp_config.values()):
            raise UsageError(
                f"task {task.id!r} has files, and no server that is started as a command: the others never "
                "see them"
            )


def _tell_left_behind(config: GymConfig, tasks: Iterable[McpTask]) -> None:
    """Warn once per path that exists here but that a server will not find in its rollout's folder."""
    left = {
        path: task.id
        for task in tasks
        if (task.files or config.files) is None
        for server in task.mcp_config.values()
        if isinstance(server, StdioServer)
        for path in find_unreachable_files(server)
    }
    for path, task_id in left.items():
        log.warning(
            "A server of task %s is given %s, which is here and not in the folder that each rollout has for "
            "itself: it will not find it. Put it there with `files` in the configuration and name it by "
            "{workdir}, or give a whole path if rollouts may share it (docs/explanation/mcp-rollouts.md).",
            task_id,
            path,
        )
