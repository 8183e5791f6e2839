"""Compose the configuration file of a new run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from buckeye.config.flags import apply_flags, parse_flags
from buckeye.config.problems import config_error
from buckeye.config.rl import RLConfig
from buckeye.config.settings import KeyPath, Settings, dotted
from buckeye.config.structure import shape_at
from buckeye.errors import UsageError
from buckeye.setup.recipe.environment import RunEnvironment
from buckeye.setup.recipe.model import ModelFacts
from buckeye.setup.recipe.sizes import RunSizes, default_learning_rate
from buckeye.setup.recipe.training_machine import GpuLayout

RUN_CONFIG = "run.toml"
_BATCH_SIZE: KeyPath = ("orchestrator", "batch_size")
_INTERVAL: KeyPath = ("orchestrator", "eval", "interval")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All parts of a run. Without a GPU, `layout` is None. `wandb` is the project in W&B, or None."""

    environment: RunEnvironment
    model: ModelFacts
    sizes: RunSizes
    layout: GpuLayout | None
    output_dir: Path
    wandb: str | None = None

    @property
    def file(self) -> Path:
        """Path of the configuration file."""
        return self.output_dir / RUN_CONFIG

    @property
    def lora(self) -> bool:
        """True if only adapters are trained."""
        return self.layout is not None and self.layout.lora


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the run in the form of a configuration file."""
    sizes, layout, steps = recipe.sizes, recipe.layout, recipe.sizes.max_steps
    environment: dict[str, Any] = {"id": recipe.environment.id}
    environment |= {"args": dict(recipe.environment.args)} if recipe.environment.args else {}
    orchestrator: dict[str, Any] = {
        "batch_size": sizes.batch_size,
        "rollouts_per_example": sizes.rollouts_per_example,
        "sampling": {"max_tokens": sizes.max_tokens},
        "env": [environment],
    }
    if sizes.held_out:
        orchestrator["eval"] = {"interval": steps, "num_examples": sizes.held_out}
    trainer: dict[str, Any] = {
        "optim": {"lr": default_learning_rate(recipe.model.parameters, lora=recipe.lora)}
    }
    if recipe.lora:
        trainer["model"] = {"experimental": {"lora": {}}}
    values: dict[str, Any] = {
        "output_dir": str(recipe.output_dir),
        "max_steps": steps,
        "seq_len": sizes.seq_len,
        "model": {"name": recipe.model.name},
        "orchestrator": orchestrator,
        "trainer": trainer,
    }
    if layout is not None:
        values["inference_gpu_ids"] = list(layout.inference)
        values["trainer_gpu_ids"] = list(layout.trainer)
    if recipe.wandb is not None:
        values["wandb"] = {"project": recipe.wandb}
    if layout is not None and layout.tp > 1:
        values["inference"] = {"parallel": {"tp": layout.tp}}
    return values


def config_text(recipe: Recipe, argv: Sequence[str] = ()) -> str:
    """Return the text of the file: the settings of the recipe, overridden by the flags in `argv`.

    Raises ConfigError for unknown flags, and UsageError for None in a table of names and values.
    """
    settings = Settings(settings_of(recipe))
    flags = parse_flags(RLConfig, argv)
    problems = [*flags.problems, *apply_flags(flags.assignments, settings)]
    if problems:
        raise config_error(problems)
    assigned = {assignment.path for assignment in flags.assignments}
    if ("orchestrator", "token_batch_size") in assigned and _BATCH_SIZE not in assigned:
        del settings.get(_BATCH_SIZE[:-1])[_BATCH_SIZE[-1]]
    for path, value in list(settings.leaves()):
        if value is None and shape_at(RLConfig, path) is None:
            message = f"{dotted(path)}: a TOML file cannot represent None here"
            raise UsageError(message, code="BK-CONFIG-VALUE", hint="Leave the argument out")
        if value is None:
            settings.get(path[:-1])[path[-1]] = "None"
    evaluation, steps = settings.get(_INTERVAL[:-1]), settings.get(("max_steps",))
    if isinstance(evaluation, dict) and isinstance(steps, int) and _INTERVAL not in assigned:
        evaluation[_INTERVAL[-1]] = steps  # evaluate after the last step, also if a flag changed max_steps
    head = "# Written by `buckeye rl`. To start this run again, in the same folder:\n"
    head += f"#   buckeye rl @ {recipe.file} --output-dir NEW_DIR\n\n"
    return head + tomli_w.dumps(settings.values)
