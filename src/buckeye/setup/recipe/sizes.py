"""Choose batch size, rollout length and number of steps for the tasks, the model and the machine."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import UsageError
from buckeye.setup.recipe.environment import RunEnvironment
from buckeye.setup.recipe.model import ModelFacts

GROUP = 8
"""Rollouts per task, which form a group."""

_MAX_GROUPS = {"gpu": 16, "cpu": 4}  # tasks in a batch
_MAX_ROLLOUT_TOKENS = {"gpu": 8192, "cpu": 2048}
_TURNS = 12  # usual number of turns that fit into a rollout
_MIN_TURNS = 4  # turns that must fit, even above _MAX_ROLLOUT_TOKENS
_MAX_DESCRIPTION_SHARE = 1 / 3  # share of a rollout for descriptions of tools; above it the plan warns
_RESULT_TOKENS = 96  # expected length of a result of a tool call
_MIN_REPLY_TOKENS = 16  # minimum room for a reply after the longest prompt, without tools
_MIN_CALL_TOKENS = 64
_TEMPLATE_TOKENS = 32  # added by a chat template
_CHARS_PER_TOKEN = 3.0
_ROUNDING = 64  # tokens
_EPOCHS = 3
_MIN_STEPS, _MAX_STEPS = 20, 200
_HELD_OUT = 32
_LEARNING_RATES = ((10_000_000, 3e-4), (100_000_000, 1e-4), (1_000_000_000, 5e-6))
_LARGE_LEARNING_RATE = 1e-6
_ADAPTER_FACTOR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSizes:
    """Sizes for the configuration.

    `prompt_tokens` is the length of the longest prompt, and `system_tokens` that of its system prompt.
    `is_exact` is True if the tokenizer of the model counted both, False if they are estimated from
    characters.
    """

    groups: int
    rollouts_per_example: int
    seq_len: int
    max_tokens: int
    max_steps: int
    held_out: int
    prompt_tokens: int
    system_tokens: int
    is_exact: bool

    @property
    def batch_size(self) -> int:
        """Number of rollouts per batch."""
        return self.groups * self.rollouts_per_example


def choose_sizes(
    environment: RunEnvironment,
    model: ModelFacts,
    *,
    on_gpu: bool,
    requested_seq_len: int | None = None,
    requested_reply: int | None = None,
) -> RunSizes:
    """Choose the sizes of a run.

    A batch contains each task at most once. `requested_seq_len` is the length of a rollout, and
    `requested_reply` the maximum length of a reply. By default, a rollout has the tokens that its turns need,
    within limits. Raises UsageError if a prompt does not fit.
    """
    kind = "gpu" if on_gpu else "cpu"
    groups = min(environment.tasks, _MAX_GROUPS[kind])
    count, is_exact = token_counter(model.path)
    system = count(environment.system)
    prompt = _TEMPLATE_TOKENS + system + max(map(count, environment.prompts))
    reply = requested_reply or environment.reply_tokens
    max_length, limit = model.positions, f"the context of {model.name} has {model.positions}"
    if requested_seq_len is not None and requested_seq_len < max_length:
        max_length, limit = requested_seq_len, f"--seq-len is {requested_seq_len}"
    least = _MIN_REPLY_TOKENS if environment.actions is None else _MIN_CALL_TOKENS
    if prompt + least > max_length:
        with_tools = f" with the system_prompt ({system} of them describe tools)" if system else ""
        fewer = ", describe fewer tools (`buckeye rl init ... --include TOOL`)" if system else ""
        raise UsageError(
            f"the longest prompt has {prompt} tokens{with_tools}, a reply needs {least}, and {limit}",
            code="BK-PROMPT-TOO-LONG",
            hint=f"Shorten the tasks{fewer}, or choose another --model",
        )
    turn_tokens = reply + (_RESULT_TOKENS if environment.turns != 1 else 0)
    turns, usual_length = environment.turns, max_length
    if turns is None:
        turns, usual_length = _TURNS, max(_MAX_ROLLOUT_TOKENS[kind], prompt + _MIN_TURNS * turn_tokens)
    needed = math.ceil(min(usual_length, prompt + turns * turn_tokens) / _ROUNDING) * _ROUNDING
    seq_len = min(max_length, requested_seq_len or needed)
    steps = math.ceil(_EPOCHS * environment.tasks / groups)
    return RunSizes(
        groups=groups,
        rollouts_per_example=GROUP,
        seq_len=seq_len,
        max_tokens=min(reply, seq_len - prompt),
        max_steps=min(max(steps, _MIN_STEPS), _MAX_STEPS),
        held_out=min(environment.held_out, _HELD_OUT),
        prompt_tokens=prompt,
        system_tokens=system,
        is_exact=is_exact,
    )


def description_share_text(sizes: RunSizes, actions: int) -> str:
    """Return the share of a rollout that the descriptions of tools take, and advice if it is high."""
    share = sizes.system_tokens / sizes.seq_len
    estimated = "" if sizes.is_exact else " (estimated from characters)"
    text = f"{actions} described in {sizes.system_tokens} tokens{estimated}, {share:.0%} of a rollout"
    if share <= _MAX_DESCRIPTION_SHARE:
        return text
    return f"{text}; to describe fewer tools: `buckeye rl init ... --include TOOL`"


def default_learning_rate(parameters: int, *, lora: bool) -> float:
    """Return the usual learning rate for models of this size."""
    rate = next((rate for size, rate in _LEARNING_RATES if parameters < size), _LARGE_LEARNING_RATE)
    return float(f"{rate * _ADAPTER_FACTOR:.3g}") if lora else rate


def token_counter(path: Path | None) -> tuple[Callable[[str], int], bool]:
    """Return a function that counts the tokens of a text, and True if it counts exactly."""
    file = path / "tokenizer.json" if path is not None else None
    if file is None or not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return lambda text: math.ceil(len(text) / _CHARS_PER_TOKEN), False
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), True
