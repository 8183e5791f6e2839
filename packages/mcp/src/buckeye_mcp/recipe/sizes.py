"""Batch, rollout and number of steps: what suits these tasks, this model and this machine."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import UsageError
from buckeye_mcp.config import GymConfig
from buckeye_mcp.recipe.model import ModelFacts
from buckeye_mcp.tasks.task_schema import McpTask

GROUP = 8
"""Rollouts of a task, which are compared with each other."""

_MOST_GROUPS = {"gpu": 16, "cpu": 4}  # tasks in a batch
_LONGEST_ROLLOUT = {"gpu": 8192, "cpu": 2048}  # tokens
_TURNS = 12  # for which a rollout gets room; more have it if they are short
_RESULT_TOKENS = 96  # of a tool's result
_REPLY_TOKENS = 128
_THOUGHT_TOKENS = 512
_TEMPLATE_TOKENS = 32  # what a chat template adds
_CHARS_PER_TOKEN = 3.0
_ROUND = 64
_EPOCHS = 3
_FEWEST_STEPS, _MOST_STEPS = 20, 200
_HELD_OUT = 32
_LEARNING_RATES = ((10_000_000, 3e-4), (100_000_000, 1e-4), (1_000_000_000, 5e-6))
_LARGE_LEARNING_RATE = 1e-6
_ADAPTER_FACTOR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What goes into the configuration. `prompt_tokens` is the longest prompt; `counted` says whether with
    the model's tokenizer or by its characters."""

    groups: int
    rollouts_per_example: int
    seq_len: int
    max_tokens: int
    max_steps: int
    held_out: int
    prompt_tokens: int
    counted: bool

    @property
    def batch_size(self) -> int:
        """Rollouts in a batch."""
        return self.groups * self.rollouts_per_example


def choose_sizes(
    tasks: Sequence[McpTask], held_out: Sequence[McpTask], gym: GymConfig, model: ModelFacts, *, on_gpu: bool
) -> Sizes:
    """Sizes with which a run works and comes to an end. No batch has a task twice. Raises UsageError for
    prompts that the model cannot read."""
    kind = "gpu" if on_gpu else "cpu"
    groups = min(len(tasks), _MOST_GROUPS[kind])
    count, counted = _counter(model.path)
    prompt = _TEMPLATE_TOKENS + count(gym.system_prompt) + max(count(task.prompt) for task in tasks)
    reply = _THOUGHT_TOKENS if gym.parser.use_thinking else _REPLY_TOKENS
    longest = min(model.positions, _LONGEST_ROLLOUT[kind])
    if prompt + _REPLY_TOKENS // 2 > longest:
        raise UsageError(
            f"the longest prompt, with the system_prompt before it, has {prompt} tokens, and "
            f"{_limit(model, longest)}. Shorten system_prompt or the tasks, or choose another --model"
        )
    turns = min(gym.defaults.max_turns, _TURNS)
    wanted = prompt + turns * (reply + _RESULT_TOKENS)
    seq_len = min(longest, math.ceil(wanted / _ROUND) * _ROUND)
    steps = math.ceil(_EPOCHS * len(tasks) / groups)
    return Sizes(
        groups=groups,
        rollouts_per_example=GROUP,
        seq_len=seq_len,
        max_tokens=min(reply, seq_len - prompt),
        max_steps=min(max(steps, _FEWEST_STEPS), _MOST_STEPS),
        held_out=min(len(held_out), _HELD_OUT),
        prompt_tokens=prompt,
        counted=counted,
    )


def learning_rate(parameters: int, *, lora: bool) -> float:
    """What models of this size usually learn with."""
    rate = next((rate for size, rate in _LEARNING_RATES if parameters < size), _LARGE_LEARNING_RATE)
    return float(f"{rate * _ADAPTER_FACTOR:.3g}") if lora else rate


def _limit(model: ModelFacts, longest: int) -> str:
    if longest == model.positions:
        return f"{model.name} reads {longest} at most"
    return (
        f"{longest} is the most that is tried here by itself (set --seq-len in a configuration of your own)"
    )


def _counter(path: Path | None) -> tuple[Callable[[str], int], bool]:
    """A function from text to tokens, and whether it counts exactly."""
    file = path / "tokenizer.json" if path is not None else None
    if file is None or not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return lambda text: math.ceil(len(text) / _CHARS_PER_TOKEN), False
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), True
