"""Check that an environment does not show the answer of a task in its messages after a wrong reply."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.base.columns import counted
from buckeye.envs.base import Message, Reply, Task, Tool
from buckeye.envs.scripted import ScriptedPolicy
from buckeye.evaluation.checks.result import CheckResult, shortened
from buckeye.evaluation.checks.samples import SplitSample, groups_of
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.evaluation.checks.task_text import accepted_answers, prompt_contains, prompt_of
from buckeye.monitor.conversation import content_text

_TASKS = 20


class _ReadingPolicy(ScriptedPolicy):
    """Scripted policy that keeps the messages of its last call, without those of its first call."""

    later: Sequence[Message] = ()
    _given: int | None = None

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        self._given = len(messages) if self._given is None else self._given
        self.later = messages[self._given :]
        return await super().chat(messages, tools=tools)


async def check_later_messages(runner: ScriptedRunner, samples: Sequence[SplitSample]) -> list[CheckResult]:
    """Compare the messages after a wrong reply with the answer of the task, and with that of another task.

    The result is empty if answers are unknown, or if the environment does not call the policy again.
    """
    compared, shown = 0, list[tuple[Task, str]]()
    for _, _, tasks in groups_of(samples):
        answered = [task for task in tasks if accepted_answers(task)][:_TASKS]
        for task, other in zip(answered, [*answered[1:], *answered[:1]], strict=True):
            policy = _ReadingPolicy("?")
            await runner.outcome(task, policy)
            text = "\n".join(
                content_text(m.get("content")) for m in policy.later if m.get("role") != "assistant"
            )
            if policy.later and not _shows(prompt_of(task), task):
                compared += 1
                shown += [(task, text)] if _shows(text, task) and not _shows(text, other) else []
    if not compared:
        return []
    name, of = "no answer in later messages", counted(compared, "conversation")
    if 2 * len(shown) < compared:
        return [CheckResult(name, "pass", f"{of} read after a wrong reply")]
    task, text = shown[0]
    detail = f"{len(shown)} of {of} show the answer after a wrong reply; for example {task.id}"
    return [CheckResult(name, "warning", f"{detail}: {accepted_answers(task)[0]!r} in {shortened(text)!r}")]


def _shows(text: str, task: Task) -> bool:
    return any(prompt_contains(text, answer) for answer in accepted_answers(task))
