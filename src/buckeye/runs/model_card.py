"""Model card of an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from buckeye.base.columns import counted, markdown_table
from buckeye.base.distribution import versions
from buckeye.base.storage import read_json
from buckeye.monitor.metrics import read_run_metrics
from buckeye.runs.checkpoint_facts import (
    CheckpointChoice,
    base_model,
    is_local,
    public_name,
    read_config,
    trained_on,
)
from buckeye.transport.checkpoint import CheckpointInfo, Score, checkpoint_scores, trainer_state_directory

_KINDS = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}
_PROGRESS = {"step": "Optimizer steps", "samples": "Samples", "tokens": "Tokens"}


def model_card(
    run: Path, choice: CheckpointChoice, scores: Sequence[Score], *, title: str, verified: str, adapter: bool
) -> str:
    """Return the text of `README.md`: the hub's header, then the training, its settings and its results.

    The text has no secrets. The only local path that it may have is that of an adapter's base model.
    """
    kind, config = read_config(run)
    base = base_model(kind, config)
    if is_local(base):
        shown = f"a local model, `{base if adapter else public_name(base)}`"
    else:
        shown = f"[{base}](https://huggingface.co/{base})"
    progress = read_json(trainer_state_directory(choice.info) / "progress.json")
    training = {
        **{label: f"{int(progress[name]):,}" for name, label in _PROGRESS.items()},
        "Trained on": trained_on(kind, config),
        "Checkpoint": f"step {choice.info.step}, {choice.reason}",
    }
    parts = [
        _header(base, kind, adapter=adapter),
        f"# {title}\n",
        f"{'An adapter (LoRA) for' if adapter else 'Made from'} {shown} by {_KINDS[kind]} with Buckeye.\n",
        _results(run, choice.info, scores),
        "## Training\n",
        markdown_table(("", ""), training.items()),
        "## Versions\n",
        markdown_table(("", ""), versions().items()),
        f"After the export: {verified}.\n",
    ]
    return "\n".join(part for part in parts if part)


def _header(base: str, kind: str, *, adapter: bool) -> str:
    tags = ("buckeye", _KINDS[kind].replace(" ", "-"), *(["lora"] if adapter else []))
    lines = [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([] if is_local(base) else [f"base_model: {base}"]),
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
    ]
    return "\n".join(lines)


def _results(run: Path, info: CheckpointInfo, scores: Sequence[Score]) -> str:
    """Return a table of rewards and validation losses, at the start of the run and at the checkpoint."""
    first = min((score.step for score in scores), default=None)
    before = {score.environment: score for score in scores if score.step == first and first < info.step}
    rows: list[Sequence[str]] = [
        (
            f"{score.environment}, split `{score.split}`, mean reward of "
            f"{counted(score.rollouts, 'rollout')}",
            f"{before[score.environment].mean_reward:.4f}" if score.environment in before else "not measured",
            f"{score.mean_reward:.4f}",
        )
        for score in checkpoint_scores(info, scores)
    ]
    metrics = read_run_metrics(run / "metrics.jsonl")
    if {0, info.step} <= metrics.of("validation").keys():
        losses = metrics.values("validation/val_loss")
        shown = (f"{losses[step]:.4f}" if step in losses else "not measured" for step in (0, info.step))
        rows.append(("Validation loss", *shown))
    return "## Results\n\n" + markdown_table(("", "before", "after"), rows) if rows else ""
