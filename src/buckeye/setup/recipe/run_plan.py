"""The plan that `buckeye rl` shows before it starts, as text and as JSON."""

from __future__ import annotations

import math
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buckeye.base.columns import counted
from buckeye.base.disk import human_bytes
from buckeye.setup.recipe.environment import has_identical_prompts, tasks_text
from buckeye.setup.recipe.sizes import description_share_text

if TYPE_CHECKING:
    from buckeye.config.orchestrator import OrchestratorConfig
    from buckeye.config.rl import RLConfig
    from buckeye.launch.preflight.disk import DiskEstimate
    from buckeye.setup.recipe.compose import Recipe

_NAME_WIDTH = 13
_BYTES_PER_PARAMETER = 2
_IDENTICAL_PROMPTS = (
    "all tasks have the same prompt, so the model cannot tell them apart; if another column has the prompts, "
    "set --prompt-column"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A planned run: its parts, its configuration, and the resources that it needs.

    `forecast` is that of the trainer on GPUs, or "". `existing` is the default folder if it has
    an earlier run, so that this run needs another folder.
    """

    recipe: Recipe
    config: RLConfig
    where: str
    forecast: str
    disk: DiskEstimate
    free: int
    price: str
    text: str
    existing: Path | None = None


def plan_text(plan: RunPlan) -> str:
    """Return the plan as lines of a name and its value, wrapped to the width of the terminal."""
    width = max(40, shutil.get_terminal_size().columns)
    lines = []
    for name, value in _rows(plan).items():
        lines += textwrap.wrap(
            value,
            width,
            initial_indent=f"{name:<{_NAME_WIDTH}}",
            subsequent_indent=" " * _NAME_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def plan_json(plan: RunPlan) -> dict[str, str]:
    """Return the plan as a JSON object: its rows, the path of the configuration file, and its text."""
    environment = plan.recipe.environment
    return {"file": str(plan.recipe.file), "dataset": environment.dataset, **_rows(plan), "text": plan.text}


def _rows(plan: RunPlan) -> dict[str, str]:
    recipe, orchestrator, disk = plan.recipe, plan.config.orchestrator, plan.disk.total
    sizes, steps = recipe.sizes, plan.config.trainer.max_steps
    groups = math.ceil(orchestrator.batch_rollouts / orchestrator.rollouts_per_example)
    needed = f"up to {human_bytes(disk)} of" if disk else "unknown before the model is downloaded;"
    environment = recipe.environment
    count = environment.actions
    tools = None if count is None else description_share_text(sizes, count)
    uses = "; ".join(environment.uses)
    epochs = (steps or 0) * groups / environment.tasks
    tracker = f"Weights & Biases, project {recipe.wandb}; to disable: --no-wandb"
    return {
        "environment": environment.about,
        **({"tools": tools} if tools else {}),
        "tasks": tasks_text(environment, is_evaluated=orchestrator.eval is not None),
        **({"they use": uses} if uses else {}),
        **({"warning": _IDENTICAL_PROMPTS} if has_identical_prompts(environment) else {}),
        "model": _model_text(recipe),
        "batch": _batch_text(orchestrator, groups),
        "rollout": f"up to {counted(orchestrator.seq_len, 'token')}; longest prompt: "
        f"{sizes.prompt_tokens}" + ("" if sizes.is_exact else " (estimated from characters)"),
        "steps": f"{steps}; about {counted(epochs, 'epoch')} over the tasks" if steps else "no limit",
        "where": plan.where,
        **({"trainer": plan.forecast} if plan.forecast else {}),
        "disk": f"{needed} {human_bytes(plan.free)} free",
        "price": plan.price,
        **({"logs to": tracker} if recipe.wandb else {}),
        "writes": f"{plan.config.output_dir}" + (f" ({plan.existing} has a run)" if plan.existing else ""),
    }


def _batch_text(orchestrator: OrchestratorConfig, groups: int) -> str:
    each = f"{counted(orchestrator.rollouts_per_example, 'rollout')} each"
    if orchestrator.token_batch_size is not None:
        tokens = f"at least {counted(orchestrator.token_batch_size, 'trained token')}"
        return f"{tokens}: {counted(groups, 'task')} or more with {each}"
    return f"{counted(orchestrator.batch_rollouts, 'rollout')}: {counted(groups, 'task')} with {each}"


def _model_text(recipe: Recipe) -> str:
    model, count = recipe.model, recipe.model.parameters
    size = f"{count:,}" if count < 1_000_000 else f"{count / 1e6:.3g} million"
    size = f"{count / 1e9:.2g} billion" if count >= 1_000_000_000 else size
    trained = "trains adapters" if recipe.lora else "trains all"
    download = "" if model.path else f"; about {human_bytes(count * _BYTES_PER_PARAMETER)} to download"
    return f"{model.name} ({'perhaps ' if model.is_estimated else ''}{size} parameters, {trained}{download})"
