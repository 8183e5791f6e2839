"""The Dakota tasks with the record at hand: look up, then answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from buckeye.envs.base import Outcome, Policy, Probe, Task
from buckeye.envs.tool_loop import play_with_tools
from dakota1890.arguments import Arguments
from dakota1890.environment import DakotaEnvironment, Mapped
from dakota1890.tools import TOOLS, DakotaTools, system_prompt, tool_prompt


class DakotaToolEnvironment(DakotaEnvironment):
    """The same tasks, splits and grades. Prompts tell neither a word's gloss nor its class nor the rule,
    where a tool does; `max_calls` calls are run, and none costs reward."""

    def __init__(self, arguments: Arguments, *, max_calls: int) -> None:
        super().__init__(replace(arguments, options=replace(arguments.options, hint=False)))
        self._max_calls = max_calls
        self._system = system_prompt(max_calls)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, as those without tools. Raises KeyError naming the splits there are."""
        return Mapped(super().tasks(split), self._with_tools)

    def probes(self) -> Sequence[Probe]:
        """Replies to held-out tasks whose reward is known."""
        return [replace(probe, task=self._with_tools(probe.task)) for probe in super().probes()]

    def curriculum(self) -> Mapping[str, Sequence[Task]]:
        """The train tasks by family and depth."""
        return {name: Mapped(tasks, self._with_tools) for name, tasks in super().curriculum().items()}

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Let the policy look things up, and grade its last reply. The counts of calls are logged only."""
        played = await play_with_tools(
            policy, task.messages, TOOLS, DakotaTools(task.data).call, max_calls=self._max_calls
        )
        graded = self.grade(task, played.reply)
        stop_reason = graded.stop_reason if played.stop_reason == "answered" else played.stop_reason
        return replace(graded, components={**graded.components, **played.components}, stop_reason=stop_reason)

    def _with_tools(self, task: Task) -> Task:
        (question,) = task.messages
        prompt = tool_prompt(question["content"], task.data)
        messages = ({"role": "system", "content": self._system}, {"role": "user", "content": prompt})
        return replace(task, messages=messages)
