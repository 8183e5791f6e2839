"""Sample rollouts and distributions of a step, as Weights & Biases shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buckeye.config.shared import WandbExtrasConfig
from buckeye.monitor.metrics import read_metrics

_SAMPLES = 8
_MOST_CHARACTERS = 4000
_COLUMNS = ("env", "task_id", "reward", "stop_reason", "error", "completion_tokens")


def sample_values(rollouts: Path, extras: WandbExtrasConfig) -> dict[str, Any]:
    """A table of the first rollouts of a step, and histograms of reward and length; empty if the step's file
    is not there."""
    import wandb

    if not rollouts.exists():
        return {}
    played = list(read_metrics(rollouts))
    values: dict[str, Any] = {}
    if extras.samples:
        rows = [[*(r.get(column) for column in _COLUMNS), _text(r["text"])] for r in played[:_SAMPLES]]
        values["samples"] = wandb.Table(columns=[*_COLUMNS, "text"], data=rows)
    if extras.distributions:
        rewards = [r["reward"] for r in played if r["reward"] is not None]
        lengths = [r["completion_tokens"] for r in played]
        if rewards:
            values["distributions/reward"] = wandb.Histogram(rewards)
        values["distributions/completion_tokens"] = wandb.Histogram(lengths)
    return values


def _text(segments: Sequence[str]) -> str:
    """All segments, cut where it is too long to be shown."""
    text = "\n\n".join(segments)
    cut = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} ... ({cut} more characters)" if cut > 0 else text
