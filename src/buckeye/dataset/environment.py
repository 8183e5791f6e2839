"""Environment of a dataset: the policy replies once to each prompt, and rewards score the reply."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from buckeye.config.problems import closest, suggestion
from buckeye.dataset.built_in import NAMES, AnswerReward, built_in_reward, is_built_in
from buckeye.dataset.functions import Completion, FunctionReward, Reward, load_function
from buckeye.dataset.judge import JudgeReward, JudgeVerdict
from buckeye.dataset.prompts import Prompts, read_prompts
from buckeye.dataset.rows import EVAL, TRAIN
from buckeye.envs.base import Outcome, Policy, Probe, Reply, Task
from buckeye.envs.outcome_validation import error_outcome, outcome_of_exception
from buckeye.envs.single_turn import FixedTasks
from buckeye.envs.stdlib_only.outcomes import OutcomeError
from buckeye.errors import THIRD_PARTY_ERRORS, UsageError
from buckeye.mcp.grading.judge import GraderVerdict

log = logging.getLogger(__name__)

NAME = "dataset"
_BASELINE_TASKS = 8
_BASELINE_SECONDS = 60.0

D = TypeVar("D")
RewardSpec = str | Callable[..., Any]
"""Reward: the name of a file, a module function or a built-in reward; or a function."""


def load_environment(
    path: str,
    reward: str | Sequence[str],
    reward_weights: Sequence[float] | None = None,
    eval_path: str | None = None,
    split: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> DatasetEnvironment:
    """Return the environment of the dataset at `path`: a file, a folder, or ORG/NAME on the hub.

    `reward` is one or several of `FILE.py`, `FILE.py:FUNCTION`, `MODULE:FUNCTION`, and built-in rewards.
    `reward_weights` has the weight of each reward in the sum. Evaluations use the rows of `eval_path`, else
    the split `test` or `validation`, else a tenth of the rows. Raises UsageError.
    """
    prompts = read_prompts(
        path,
        split=split,
        eval_source=eval_path,
        prompt_column=prompt_column,
        answer_column=answer_column,
    )
    specs = [reward] if isinstance(reward, str) else list(reward)
    return make_environment(prompts, specs, reward_weights)


def evaluation_rows(dataset: D, split: str | None) -> tuple[D | None, str | None, str]:
    """Return `eval_path` and `split` for `load_environment`, and the environment's split to evaluate on.

    `split` is the split that the user requests. `train` has the rows that a run trains on, and `eval` the
    rows that it holds out. Other names are splits of the dataset. None selects the split `test` or
    `validation`, or else all rows.
    """
    if split in (TRAIN, EVAL):
        return None, None, split
    return dataset, split, TRAIN if split else EVAL


def make_environment(
    prompts: Prompts, specs: Sequence[RewardSpec], weights: Sequence[float] | None = None, *, name: str = NAME
) -> DatasetEnvironment:
    """Return the environment of prompts and rewards. Raises UsageError for a reward that cannot be used."""
    if not specs:
        raise UsageError(
            "no reward is set", code="BK-REWARD", hint=f"name a file, or one of {', '.join(NAMES)}"
        )
    weights = [1.0] * len(specs) if weights is None else list(weights)
    if len(weights) != len(specs) or not all(math.isfinite(weight) for weight in weights):
        raise UsageError(
            f"{len(weights)} reward_weights for {len(specs)} rewards",
            code="BK-REWARD",
            hint="give each reward one finite weight",
        )
    rewards = [_make_reward(spec, prompts) for spec in specs]
    names = _distinct_names(rewards)
    splits = {
        split: tasks.map(partial(_with_answers, rewards=rewards)) for split, tasks in prompts.splits.items()
    }
    kind = GroupDatasetEnvironment if any(reward.needs_group for reward in rewards) else DatasetEnvironment
    log.info("%s", prompts.summary)
    return kind(name, splits, [WeightedReward(*parts) for parts in zip(names, rewards, weights, strict=True)])


def _make_reward(spec: RewardSpec, prompts: Prompts) -> Reward:
    if not isinstance(spec, str):
        if not callable(spec):
            raise UsageError(
                f"the reward {spec!r} is not a function", code="BK-REWARD", hint="pass a function, or a text"
            )
        return FunctionReward(spec, prompts.columns, prompts.tasks())
    if is_built_in(spec):
        return built_in_reward(spec, prompts.columns, prompts)
    if not spec.endswith(".py") and ":" not in spec:
        hint = suggestion(closest(spec, NAMES, count=1)) or (
            f"name FILE.py, FILE.py:FUNCTION, MODULE:FUNCTION, or one of {', '.join(NAMES)}"
        )
        raise UsageError(f"no reward {spec!r}", code="BK-REWARD", hint=hint)
    return FunctionReward(load_function(spec), prompts.columns, prompts.tasks())


def _with_answers(task: Task, *, rewards: Sequence[Reward]) -> Task:
    """Return the task with the answers of its row in its data, where `buckeye env check` finds them."""
    answers = next((found for reward in rewards if (found := reward.answers_in(task.data["row"]))), None)
    return task if answers is None else replace(task, data={**task.data, **answers})


def _first_answer(task: Task) -> Any:
    accepted = task.data.get("accept")
    return accepted[0] if isinstance(accepted, list) and accepted else task.data.get("answer")


def _distinct_names(rewards: Sequence[Reward]) -> list[str]:
    names: list[str] = []
    for reward in rewards:
        count = sum(name.partition("#")[0] == reward.name for name in names)
        names.append(f"{reward.name}#{count + 1}" if count else reward.name)
    return names


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """Reward with its weight in the sum, and its name in the components of an outcome."""

    name: str
    reward: Reward
    weight: float


class DatasetEnvironment(FixedTasks):
    """Environment where the policy replies once to each prompt, and rewards score the reply."""

    turns = 1
    """Maximum number of turns of a rollout. The plan of a run uses it to choose `seq_len`."""
    _group_size = 1
    """Number of replies that a reward needs in one call."""

    def __init__(
        self, name: str, splits: Mapping[str, Sequence[Task]], rewards: Sequence[WeightedReward]
    ) -> None:
        super().__init__(name, splits)
        self._rewards = rewards

    @property
    def has_own_scale(self) -> bool:
        """True unless a right answer has the reward 1, and a wrong one 0."""
        return [type(part.reward) for part in self._rewards] != [AnswerReward] or self._rewards[0].weight != 1

    @property
    def judged(self) -> tuple[str, ...]:
        """Names of the components that a model gives."""
        return tuple(part.name for part in self._rewards if isinstance(part.reward, JudgeReward))

    def probes(self) -> list[Probe]:
        """Return the replies that people have labelled for the judges."""
        judges = [(part.name, part.reward) for part in self._rewards if isinstance(part.reward, JudgeReward)]
        return [probe for name, reward in judges for probe in reward.labelled(name)]

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Call the policy once and grade its reply."""
        completion = _completion_of(await policy.chat(task.messages))
        return (await self._grade(task, [replace(completion, policy=policy)]))[0]

    async def baseline_report(self) -> str:
        """Return a line with the mean reward of empty replies, repeated prompts, and right answers if known.

        It is measured on a few tasks.
        """
        try:
            async with asyncio.timeout(_BASELINE_SECONDS):
                return await self._measure_baseline()
        except TimeoutError:
            return f"the reward of empty replies is unknown: no result in {_BASELINE_SECONDS:g} s"

    async def _measure_baseline(self) -> str:
        tasks = list(self._splits[TRAIN][:_BASELINE_TASKS])
        replies = {
            "empty replies": [""] * len(tasks),
            "repeated prompts": [str(task.messages[-1].get("content")) for task in tasks],
        }
        answers = [_first_answer(task) for task in tasks]
        if all(answer is not None for answer in answers):
            replies["bare right answers"] = [str(answer) for answer in answers]
        parts = []
        for label, texts in replies.items():
            outcomes = []
            for task, text in zip(tasks, texts, strict=True):
                message = {"role": "assistant", "content": text}
                completion = Completion(text=text, message=message, token_ids=())
                outcomes += (await self._grade(task, [completion] * self._group_size))[:1]
            rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
            mean = (
                f"{math.fsum(rewards) / len(rewards):.3f}" if rewards else f"an error ({outcomes[0].error})"
            )
            parts.append(f"{label} get {mean}")
        return f"{', '.join(parts)} (mean reward over {len(tasks)} prompts)"

    async def _grade(self, task: Task, completions: Sequence[Completion]) -> list[Outcome]:
        """Return the outcomes of replies to a task. If a reward fails, the outcome is an error."""
        parts = (_scored(part.reward, task, completions) for part in self._rewards)
        columns: list[list[GraderVerdict]] = []
        for scored in await asyncio.gather(*parts):
            if isinstance(scored, Outcome):
                return [scored] * len(completions)
            columns.append(scored)
        return [
            self._outcome(completion, verdicts)
            for completion, verdicts in zip(completions, zip(*columns, strict=True), strict=True)
        ]

    def _outcome(self, completion: Completion, verdicts: Sequence[GraderVerdict]) -> Outcome:
        pairs = list(zip(self._rewards, verdicts, strict=True))
        components = {part.name: verdict.score for part, verdict in pairs}
        total = math.fsum(abs(part.weight * verdict.score) for part, verdict in pairs)
        for part, verdict in pairs:
            if isinstance(verdict, JudgeVerdict):
                components |= {f"{part.name}_{name}": value for name, value in verdict.counts.items()}
                if len(pairs) > 1:
                    share = abs(part.weight * verdict.score)
                    components[f"{part.name}_share"] = share / total if total else 0.0
        return Outcome(
            reward=math.fsum(part.weight * verdict.score for part, verdict in pairs),
            components=components,
            explanations={part.name: verdict.explanation for part, verdict in pairs if verdict.explanation},
            stop_reason="truncated" if completion.truncated else "answered",
        )


class GroupDatasetEnvironment(DatasetEnvironment):
    """Environment of a dataset with a reward function that scores all replies of a group in one call.

    A pending outcome contains its reply as JSON, so that the environment keeps no state of dropped groups.
    """

    _group_size = 2

    async def rollout_in_group(self, task: Task, policy: Policy) -> Outcome:
        """Call the policy once, and return a pending outcome with its reply."""
        completion = _completion_of(await policy.chat(task.messages))
        ids = None if completion.token_ids is None else list(completion.token_ids)
        fields = [completion.text, dict(completion.message), ids, completion.truncated]
        return Outcome(reward=None, pending=json.dumps(fields))

    async def finish_group(self, task: Task, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return the outcomes with the rewards of pending ones. Outcomes with errors stay unchanged."""
        completions = [Completion(*json.loads(o.pending)) for o in outcomes if o.pending is not None]
        graded = iter(await self._grade(task, completions) if completions else ())
        return [outcome if outcome.pending is None else next(graded) for outcome in outcomes]


async def _scored(
    reward: Reward, task: Task, completions: Sequence[Completion]
) -> list[GraderVerdict] | Outcome:
    """Return the verdicts of a reward, or an error outcome if the reward fails."""
    try:
        return await reward.score(task, completions)
    except OutcomeError as error:  # its message already names the line of code
        return error_outcome("score", str(error))
    except THIRD_PARTY_ERRORS as error:
        return outcome_of_exception("score", error)


def _completion_of(reply: Reply) -> Completion:
    content = reply.message.get("content")
    return Completion(
        text=content if isinstance(content, str) else reply.text,
        message=reply.message,
        token_ids=list(reply.tokens.token_ids) if reply.tokens is not None else None,
        truncated=reply.finish_reason == "length",
    )
