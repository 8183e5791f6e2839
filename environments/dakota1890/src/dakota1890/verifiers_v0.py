"""The Dakota tasks for the v0 API of `verifiers` (0.1.14 to 0.3): a dataset, a rubric, one turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import verifiers as vf
from datasets import Dataset

from dakota1890.arguments import check_tool_arguments, checked_arguments
from dakota1890.audit import GradeMismatchError
from dakota1890.rows import confirmed_grade, from_info, split_items, to_info
from dakota1890.tasks import Item
from dakota1890.tools import system_prompt as tools_system_prompt
from dakota1890.tools import tool_prompt
from dakota1890.verifiers_v0_tools import DakotaToolEnv

NUM_TRAIN = 2_000
"""Fewer than elsewhere: a v0 dataset is written out in full before the first rollout."""

COMPONENTS = ("exact", "ortho_miss", "sim", "format_ok", "truncated")


def load_environment(
    *,
    families: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    hints: Literal["rule", "none"] = "rule",
    invented: bool = False,
    invented_fraction: float = 0.5,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_eval: int | None = None,
    shaping: bool = True,
    tools: bool = False,
    max_calls: int = 4,
    system_prompt: str | None = None,
) -> vf.Environment:
    """A `SingleTurnEnv` with the train tasks as its dataset and the held-out ones as its evaluation; with
    `tools` a `ToolEnv`, in which the record can be looked up `max_calls` times.

    The arguments are those of `dakota1890.environment.load_environment`, and a system prompt to put before
    every question. Both datasets are built when they are first asked for.
    Raises ArgumentError for an argument outside these; so does asking for the dataset of families and depths
    that are only evaluated.
    """
    check_tool_arguments(tools=tools, max_calls=max_calls)
    arguments = checked_arguments(
        families=families,
        depths=depths,
        hints="none" if tools else hints,  # the tools tell the rules
        invented=invented,
        invented_fraction=invented_fraction,
        seed=seed,
        num_train=num_train,
        num_eval=num_eval,
        shaping=shaping,
    )
    shared = {
        "dataset": lambda: to_dataset(split_items(arguments, "train"), tools=tools),
        "eval_dataset": lambda: to_dataset(split_items(arguments, "eval"), tools=tools),
        "rubric": make_rubric(shaping=shaping),
        "env_id": "dakota1890",
    }
    if not tools:
        return vf.SingleTurnEnv(system_prompt=system_prompt, **shared)
    told = "\n\n".join([*filter(None, [system_prompt]), tools_system_prompt(max_calls)])
    return DakotaToolEnv(max_calls=max_calls, system_prompt=told, **shared)


def to_dataset(items: Sequence[Item], *, tools: bool) -> Dataset:
    """The items as rows of question, answer and info."""
    return Dataset.from_list([to_row(item, tools=tools) for item in items])


def to_row(item: Item, *, tools: bool) -> dict[str, str]:
    """One row. `info` is JSON, because the columns of a dataset cannot hold what differs between families."""
    return {
        "question": tool_prompt(item.prompt, item.data) if tools else item.prompt,
        "answer": item.data["accept"][0],
        "info": json.dumps(to_info(item), ensure_ascii=False),
    }


def make_rubric(*, shaping: bool) -> vf.Rubric:
    """One reward, `grade`, and the components as metrics that are not paid."""

    def grade(completion: Any, info: Mapping[str, Any], state: vf.State) -> float:
        if state.get("error") is not None:
            return 0.0
        _, data = from_info(info)
        truncated = any(step["is_truncated"] for step in state["trajectory"][-1:])
        try:
            result = confirmed_grade(last_reply(completion), data, shaping=shaping, truncated=truncated)
        except GradeMismatchError as mismatch:
            # verifiers makes a reward function's exception a reward of 0; only this marks the rollout.
            state["error"] = vf.Error(str(mismatch))
            raise
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
    """The text of the last assistant message; its parts joined, and empty where there is none."""
    for message in reversed(completion):
        fields = message if isinstance(message, Mapping) else message.model_dump()
        if fields["role"] == "assistant":
            content = fields.get("content") or ""
            return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return ""
