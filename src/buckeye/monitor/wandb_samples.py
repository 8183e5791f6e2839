"""Sample rollouts and distributions of a step in the format of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buckeye.config.shared import WandbExtrasConfig
from buckeye.monitor.rollouts import read_rollouts

_SAMPLES = 8
_MAX_CHARACTERS = 4000
_COLUMNS = ("env", "task_id", "reward", "stop_reason", "error", "completion_tokens")


def sample_values(run: Path, step: int, extras: WandbExtrasConfig) -> dict[str, Any]:
    """Return values to log for a step: a table of sample rollouts, and histograms of reward and length.

    The table has the first rollouts that the step trained on. The result is empty without rollouts.
    """
    import wandb

    trained = [rollout for rollout in read_rollouts(run, step)[0] if rollout.dropped is None]
    if not trained:
        return {}
    values: dict[str, Any] = {}
    if extras.samples:
        rows = [[*(getattr(r, column) for column in _COLUMNS), _text(r.text)] for r in trained[:_SAMPLES]]
        values["samples"] = wandb.Table(columns=[*_COLUMNS, "text"], data=rows)
    if extras.distributions:
        rewards = [r.reward for r in trained if r.reward is not None]
        lengths = [r.completion_tokens for r in trained]
        if rewards:
            values["distributions/reward"] = wandb.Histogram(rewards)
        values["distributions/completion_tokens"] = wandb.Histogram(lengths)
    return values


def _text(segments: Sequence[str]) -> str:
    """Return all segments joined, cut if too long to display."""
    text = "\n\n".join(segments)
    cut = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]} ... ({cut} more characters)" if cut > 0 else text
