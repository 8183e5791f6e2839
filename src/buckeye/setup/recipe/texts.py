"""What `buckeye rl` shows before it starts: the plan, as text and as JSON."""

from __future__ import annotations

import math
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from buckeye.base.disk import human_bytes
from buckeye.launch.progress import human_duration
from buckeye.setup.recipe.sizes import described_text

if TYPE_CHECKING:
    from buckeye.config.rl import RLConfig
    from buckeye.launch.preflight.disk import DiskEstimate
    from buckeye.mcp.tasks.trust import Uses
    from buckeye.setup.recipe.compose import Recipe
    from buckeye.setup.recipe.estimate import TimeEstimate

_GAP = 13
_BYTES_PER_PARAMETER = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run as it will be: its parts, its configuration, and what it will take."""

    recipe: Recipe
    config: RLConfig
    environment: str
    actions: tuple[str, ...]
    images: tuple[str, ...]
    uses: Uses
    tasks: int
    held_out: int
    where: str
    devices: str
    disk: DiskEstimate
    free: int
    time: TimeEstimate | None
    price: str
    text: str

    @property
    def groups(self) -> int:
        """Tasks in a batch, which is how many there should be at least."""
        orchestrator = self.config.orchestrator
        return math.ceil(orchestrator.batch_size / orchestrator.rollouts_per_example)


def plan_text(plan: Plan) -> str:
    """The plan as lines of a name and what there is to say, as wide as the terminal."""
    width = max(40, shutil.get_terminal_size().columns)
    lines = []
    for name, value in _rows(plan):
        lines += textwrap.wrap(
            value,
            width,
            initial_indent=f"{name:<{_GAP}}",
            subsequent_indent=" " * _GAP,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def plan_object(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object."""
    recipe, config = plan.recipe, plan.config
    return {
        "file": str(recipe.file),
        "environment": plan.environment,
        "config": str(recipe.config),
        "actions": list(plan.actions),
        "dataset": recipe.dataset,
        "tasks": plan.tasks,
        "uses": {**asdict(plan.uses), "digest": plan.uses.digest},
        "held_out": plan.held_out,
        "minimum_tasks": plan.groups,
        "model": recipe.model.name,
        "parameters": recipe.model.parameters,
        "batch_size": config.orchestrator.batch_size,
        "rollouts_per_example": config.orchestrator.rollouts_per_example,
        "seq_len": config.orchestrator.seq_len,
        "prompt_tokens": recipe.sizes.prompt_tokens,
        "tool_tokens": recipe.sizes.system_tokens,
        "max_steps": config.trainer.max_steps,
        "where": plan.where,
        "inference_gpu_ids": list(recipe.layout.inference) if recipe.layout is not None else [],
        "trainer_gpu_ids": list(recipe.layout.trainer) if recipe.layout is not None else [],
        "lora": recipe.lora,
        "disk_bytes": plan.disk.total,
        "seconds": round(plan.time.seconds) if plan.time else None,
        "seconds_range": [round(plan.time.least), round(plan.time.most)] if plan.time else None,
        "seconds_source": plan.time.source if plan.time else None,
        "price": plan.price,
        "output_dir": str(config.output_dir),
        "text": plan.text,
    }


def _rows(plan: Plan) -> list[tuple[str, str]]:
    recipe, orchestrator, disk = plan.recipe, plan.config.orchestrator, plan.disk.total
    needed = f"up to {human_bytes(disk)} of" if disk else "not known before the model is here;"
    return [
        ("environment", f"{plan.environment} ({recipe.config}: {', '.join(plan.actions)})"),
        ("tools", described_text(recipe.sizes, len(plan.actions) - 1)),
        ("tasks", f"{plan.tasks} to train on, {_held_out(plan)} ({recipe.dataset})"),
        ("they use", "; ".join(plan.uses.lines())),
        ("model", _model(plan)),
        (
            "batch",
            f"{orchestrator.batch_size} rollouts: {_tasks(plan.groups)}, each played "
            f"{orchestrator.rollouts_per_example} times; that needs at least {_tasks(plan.groups)}",
        ),
        ("rollout", f"up to {orchestrator.seq_len} tokens; the longest prompt has {_prompt(plan)}"),
        ("steps", _steps(plan)),
        ("where", f"{plan.where}; {plan.devices}"),
        ("disk", f"{needed} {human_bytes(plan.free)} free"),
        ("time", _time(plan.time)),
        ("price", plan.price),
        ("writes", f"{plan.config.output_dir}"),
    ]


def _model(plan: Plan) -> str:
    model = plan.recipe.model
    size = f"{'perhaps ' if model.guessed else ''}{_parameters(model.parameters)} parameters"
    trained = "adapters are trained" if plan.recipe.lora else "all of them trained"
    to_fetch = f"; about {human_bytes(model.parameters * _BYTES_PER_PARAMETER)} to fetch"
    return f"{model.name} ({size}, {trained}{to_fetch if model.path is None else ''})"


def _time(time: TimeEstimate | None) -> str:
    if time is None:
        return "until you stop it"
    if time.least == time.most:
        return f"about {human_duration(time.seconds)} ({time.source})"
    between = f"{human_duration(time.least)} to {human_duration(time.most)}"
    return f"{between} ({time.source}, without what the environment takes)"


def _held_out(plan: Plan) -> str:
    if not plan.held_out:
        return "none held out"
    return f"{plan.held_out} held out" + ("" if plan.config.orchestrator.eval else ", without evaluation")


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"


def _prompt(plan: Plan) -> str:
    sizes = plan.recipe.sizes
    return f"{sizes.prompt_tokens}{'' if sizes.counted else ' (estimated by its characters)'}"


def _steps(plan: Plan) -> str:
    steps = plan.config.trainer.max_steps
    if steps is None:
        return "without end"
    times = steps * plan.groups / plan.tasks
    return f"{steps}; every task is in a batch about {times:.3g} times"


def _parameters(count: int) -> str:
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2g} billion"
    return f"{count / 1e6:.3g} million" if count >= 1_000_000 else f"{count:,}"
