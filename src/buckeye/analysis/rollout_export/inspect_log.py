"""Write rollouts as logs of Inspect (`.eval`). Only this module imports Inspect."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    ModelOutput,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall

from buckeye.analysis.rollout_export.indexed_rollouts import IndexedRollout
from buckeye.envs.call_arguments import read_arguments
from buckeye.monitor.conversation import RecordedMessage, RecordedToolCall, conversation

_UNSAFE = re.compile(r"[^\w.\-]+")
_BATCH = itemgetter("split", "step", "env")


def write_logs(rollouts: Iterable[IndexedRollout], directory: Path, model: str) -> int:
    """Write a log per step and environment, and return the number of rollouts.

    Rollouts of a step and environment must be adjacent in `rollouts`. The rollouts of a task become its
    epochs. A rollout without a reward has no score.
    """
    written, taken = 0, set[str]()
    for (split, step, env), of_it in groupby(rollouts, key=lambda indexed: _BATCH(indexed.row)):
        epochs: Counter[str] = Counter()
        samples = [_sample(indexed, epochs, model) for indexed in of_it]
        name = _file_name(f"{split}-{env}-step-{step}", taken)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        log = EvalLog(
            status="success",
            eval=EvalSpec(
                created=now,
                task=f"{env} ({split}, step {step})",
                dataset=EvalDataset(name=env, samples=len(epochs), sample_ids=list(epochs)),
                model=model,
                config=EvalConfig(epochs=max(epochs.values())),
                metadata={"split": split, "step": step, "environment": env},
            ),
            results=_results(samples),
            stats=EvalStats(started_at=now, completed_at=now),  # without them, the viewer shows NaN
            samples=samples,
        )
        write_eval_log(log, str(directory / f"{name}.eval"), format="eval")
        written += len(samples)
    return written


def _sample(indexed: IndexedRollout, epochs: Counter[str], model: str) -> EvalSample:
    row, rollout = indexed.row, indexed.rollout
    epochs[rollout.task_id] += 1
    recorded = conversation(rollout)
    first = next((i for i, message in enumerate(recorded) if message.role == "assistant"), len(recorded))
    messages = [_message(message) for message in recorded]
    last = next((message.text for message in reversed(recorded) if message.role == "assistant"), "")
    values = {} if rollout.reward is None else {"reward": rollout.reward, **rollout.components}
    explained = "\n".join(f"{name}: {text}" for name, text in rollout.explanations.items()) or None
    failed = rollout.error if rollout.reward is None else None
    return EvalSample(
        id=rollout.task_id,
        epoch=epochs[rollout.task_id],
        input=messages[:first] or "",
        target="",
        messages=messages,
        output=ModelOutput.from_content(model, last, "max_tokens" if rollout.truncated else "stop"),
        scores={
            name: Score(value=value, answer=last, explanation=explained) for name, value in values.items()
        },
        metadata={name: value for name, value in row.items() if name not in ("components", "error")},
        error=EvalError(message=failed, traceback="", traceback_ansi="") if failed else None,
        total_time=rollout.seconds,
    )


def _file_name(name: str, taken: set[str]) -> str:
    """Return a safe file name derived from `name` that is not in `taken`, and add it to `taken`."""
    safe, number = _UNSAFE.sub("_", name), 1
    found = safe
    while found.casefold() in taken:
        number += 1
        found = f"{safe}~{number}"
    taken.add(found.casefold())
    return found


def _message(recorded: RecordedMessage) -> ChatMessage:
    if recorded.role == "assistant":
        content: Any = recorded.text
        if recorded.reasoning:
            content = [ContentReasoning(reasoning=recorded.reasoning), ContentText(text=recorded.text)]
        return ChatMessageAssistant(
            content=content, tool_calls=[_call(call) for call in recorded.calls] or None
        )
    if recorded.role == "tool":
        return ChatMessageTool(content=recorded.text, tool_call_id=recorded.tool_call_id)
    if recorded.role in ("system", "developer"):
        return ChatMessageSystem(content=recorded.text)
    return ChatMessageUser(content=recorded.text)


def _call(call: RecordedToolCall) -> ToolCall:
    """Convert a tool call to a call of Inspect, which has the error if the arguments cannot be parsed."""
    try:
        return ToolCall(id=call.id, function=call.name, arguments=read_arguments(call.arguments))
    except ValueError as error:
        problem = f"the arguments {error}: {call.arguments}"
        return ToolCall(id=call.id, function=call.name, arguments={}, parse_error=problem)


def _results(samples: Sequence[EvalSample]) -> EvalResults:
    scored = [sample.scores for sample in samples if sample.scores]
    means = {
        name: statistics.fmean(float(scores[name].value) for scores in scored if name in scores)
        for name in dict.fromkeys(name for scores in scored for name in scores)
    }
    return EvalResults(
        total_samples=len(samples),
        completed_samples=sum(sample.error is None for sample in samples),
        scores=[
            EvalScore(
                name=name,
                scorer=name,
                scored_samples=len(scored),
                unscored_samples=len(samples) - len(scored),
                metrics={"mean": EvalMetric(name="mean", value=mean)},
            )
            for name, mean in means.items()
        ],
    )
