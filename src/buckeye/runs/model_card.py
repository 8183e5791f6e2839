"""Model card of an exported model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from buckeye.base.columns import counted
from buckeye.runs.checkpoint_facts import ModelCardFacts, public_name

_KINDS = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}


def model_card(facts: ModelCardFacts, *, title: str, reason: str, verified: str, adapter: bool) -> str:
    """Return the text of `README.md`: the hub's header, then the training, its settings and its results."""
    local = facts.base if adapter else public_name(facts.base)  # an adapter needs the full path of its base
    base = facts.base_id or f"a local model, `{local}`"
    what = "An adapter (LoRA) for" if adapter else "Made from"
    parts = [
        _header(facts, adapter=adapter),
        f"# {title}\n",
        f"{what} {_linked(facts.base_id) if facts.base_id else base} by {_KINDS[facts.kind]} with Buckeye.\n",
        _results(facts),
        "## Training\n",
        _table(("", ""), {**_progress(facts), "Trained on": facts.trained_on, "Checkpoint": reason}.items()),
        "## Versions\n",
        _table(("", ""), facts.versions.items()),
        f"After the export: {verified}.\n",
    ]
    return "\n".join(part for part in parts if part)


def _header(facts: ModelCardFacts, *, adapter: bool) -> str:
    lines = [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {facts.base_id}"] if facts.base_id else []),
        "tags:",
        *(
            f"- {tag}"
            for tag in ("buckeye", _KINDS[facts.kind].replace(" ", "-"), *(["lora"] if adapter else []))
        ),
        "---",
        "",
    ]
    return "\n".join(lines)


def _linked(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})"


def _progress(facts: ModelCardFacts) -> Mapping[str, str]:
    names = {"step": "Optimizer steps", "samples": "Samples", "tokens": "Tokens"}
    return {names[key]: f"{value:,}" for key, value in facts.progress.items()}


def _results(facts: ModelCardFacts) -> str:
    before = {s.environment: s for s in facts.before}
    rows: list[Sequence[str]] = [
        (
            f"{score.environment}, split `{score.split}`, mean reward of "
            f"{counted(score.rollouts, 'rollout')}",
            f"{before[score.environment].mean_reward:.4f}" if score.environment in before else "not measured",
            f"{score.mean_reward:.4f}",
        )
        for score in facts.after
    ]
    if facts.losses is not None:
        shown = ("not measured" if loss is None else f"{loss:.4f}" for loss in facts.losses)
        rows.append(("Validation loss", *shown))
    return "## Results\n\n" + _table(("", "before", "after"), rows) if rows else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
