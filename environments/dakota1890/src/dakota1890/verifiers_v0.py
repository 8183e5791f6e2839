"""The Dakota tasks for the v0 API of `verifiers` (0.1.14 to 0.3): a dataset, a rubric, one turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset

from dakota1890.arguments import check_arguments
from dakota1890.grading import grade as grade_reply
from dakota1890.rows import from_info, split_items, to_info
from dakota1890.tasks import Item

NUM_TRAIN = 2_000
"""Smaller than Buckeye's default, because v0 writes the whole dataset before the first rollout."""

COMPONENTS = ("exact", "ortho_miss", "sim", "format_ok", "truncated")


def load_environment(
    *, num_train: int = NUM_TRAIN, system_prompt: str | None = None, **arguments: Any
) -> vf.Environment:
    """Return a `SingleTurnEnv` with the train tasks as its dataset and the held-out ones as its evaluation.

    The arguments are those of `dakota1890.environment.load_environment`, and a system prompt for every
    question. Both datasets are built on first access. Raises ArgumentError for an invalid argument; so does
    the train dataset of families and depths that are only evaluated.
    """
    checked = check_arguments(num_train=num_train, **arguments)
    return vf.SingleTurnEnv(
        dataset=lambda: to_dataset(split_items(checked, "train")),
        eval_dataset=lambda: to_dataset(split_items(checked, "eval")),
        rubric=make_rubric(shaping=checked.shaping),
        env_id="dakota1890",
        system_prompt=system_prompt,
    )


def to_dataset(items: Sequence[Item]) -> Dataset:
    """Return the items as rows; `info` is JSON because a column of a dataset needs one type."""
    rows = [
        {
            "question": item.prompt,
            "answer": item.data["accept"][0],
            "info": json.dumps(to_info(item), ensure_ascii=False),
        }
        for item in items
    ]
    return Dataset.from_list(rows)


def make_rubric(*, shaping: bool) -> vf.Rubric:
    """Return a rubric with one reward, `grade`, and the components as metrics of weight 0."""

    def grade(completion: Any, info: Mapping[str, Any], state: vf.State) -> float:
        if state.get("error") is not None:
            return 0.0
        _, data = from_info(info)
        truncated = any(step["is_truncated"] for step in state["trajectory"][-1:])
        result = grade_reply(last_reply(completion), data, shaping=shaping, truncated=truncated)
        state["components"] = result.components
        return result.reward

    metrics = [_component(name) for name in COMPONENTS]
    return vf.Rubric(funcs=[grade, *metrics], weights=[1.0, *(0.0 for _ in metrics)])


def _component(name: str) -> Callable[[vf.State], float]:
    def component(state: vf.State) -> float:
        return float(state.get("components", {}).get(name, 0.0))

    component.__name__ = name
    return component


def last_reply(completion: Any) -> str:
    """Return the text of the last assistant message with its parts joined, or ""."""
    for message in reversed(completion):
        fields = message if isinstance(message, Mapping) else message.model_dump()
        if fields["role"] == "assistant":
            content = fields.get("content") or ""
            return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return ""
