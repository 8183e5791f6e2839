"""What is known of a run and of one of its checkpoints, without paths and secrets of this machine."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from buckeye.checkpoint import Score, scores_of, trainer_state
from buckeye.distribution import DISTRIBUTION
from buckeye.errors import UsageError
from buckeye.monitor.metrics import read_run
from buckeye.monitor.redact import redacted
from buckeye.run.export.choose import Choice
from buckeye.storage import read_json

_LIBRARIES = (DISTRIBUTION, "torch", "transformers", "peft", "vllm")
_MOST_STEPS = 10
"""Over how many steps training rewards are averaged, where there are as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRewards:
    """Mean rewards of the first and of the last `steps` steps before a checkpoint."""

    steps: int
    first: float
    last: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """`base` is the model that training started from, a directory or a name on the hub; `base_id` the same
    if it is such a name. `settings` are the important ones of the run, by the names that a card shows.
    `before` and `after` are evaluations at the start and of the exported checkpoint; `losses` are validation
    losses of the same, None where there was none that is a number."""

    kind: str
    base: str
    base_id: str | None
    settings: Mapping[str, str]
    progress: Mapping[str, int]
    before: Sequence[Score]
    after: Sequence[Score]
    rewards: TrainingRewards | None
    losses: tuple[float | None, float | None] | None
    versions: Mapping[str, str]


def read_config(run: Path) -> tuple[str, dict[str, Any]]:
    """Which kind of run it was, `rl` or `sft`, and its resolved configuration. Raises UsageError."""
    for kind, part in (("rl", "trainer"), ("sft", "model")):
        path = run / "configs" / f"{kind}.json"
        if path.exists():
            try:
                config = read_json(path)
                if not isinstance(config[part], dict):
                    raise TypeError(f"`{part}` is no table")
                return kind, config
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise UsageError(f"{path} cannot be read: {error!r}") from error
    raise UsageError(f"{run} holds no run of `rl` or `sft`: it has no configs/rl.json or configs/sft.json.")


def gather_facts(run: Path, choice: Choice, scores: Sequence[Score]) -> RunFacts:
    """Read all that a model card says from the run directory."""
    kind, config = read_config(run)
    trainer = config["trainer"] if kind == "rl" else config
    base = str(trainer["model"]["name"])
    progress = read_json(trainer_state(choice.info) / "progress.json")
    first = min((s.step for s in scores), default=None)
    step = choice.info.step
    return RunFacts(
        kind=kind,
        base=base,
        base_id=None if _is_local(base) else base,
        settings=redacted(_rl_settings(config) if kind == "rl" else _sft_settings(config)),
        progress={name: int(progress[name]) for name in ("step", "samples", "tokens")},
        before=[s for s in scores if s.step == first and s.step < step],
        after=scores_of(choice.info, scores),
        rewards=_training_rewards(run, step),
        losses=_validation_losses(run, step),
        versions=_versions(),
    )


def public_name(name: str) -> str:
    """A name that says nothing of this machine: that of a local file or directory is its last part."""
    return Path(name).name if _is_local(name) else name


def _is_local(name: str) -> bool:
    """Whether a name is a path. What is in the current directory says nothing: a run records the models and
    data that it found there by their absolute paths."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _rl_settings(config: Mapping[str, Any]) -> dict[str, str]:
    trainer, orchestrator = config["trainer"], config["orchestrator"]
    environments = [_environment(str(env["id"])) for env in orchestrator["env"]]
    return {
        "Environments": ", ".join(environments),
        "Loss": _flat(trainer["loss"]),
        "Advantages": _flat(orchestrator["advantage"]) or "none: plain rewards",
        **_optimization(trainer),
        "Rollouts of a step": str(orchestrator["batch_size"]),
        "Rollouts of a task": str(orchestrator["rollouts_per_example"]),
        "Sampling may run ahead by": f"{orchestrator['max_async_level']} steps",
        "Longest rollout": f"{orchestrator['seq_len']} tokens",
        "Seeds": f"trainer {trainer['seed']}, orchestrator {orchestrator['seed']}",
    }


def _environment(name: str) -> str:
    return Path(name).stem if name.endswith(".py") else public_name(name)


def _sft_settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Data": Path(config["data"]["path"]).name,
        **_optimization(config),
        "Conversations of a step": str(config["batch_size"]),
        "Longest conversation": f"{config['seq_len']} tokens",
        "Seeds": f"trainer {config['seed']}, data {config['data']['seed']}",
    }


def _optimization(trainer: Mapping[str, Any]) -> dict[str, str]:
    lora = trainer["model"]["experimental"]["lora"]
    return {
        "Optimizer": _flat(trainer["optim"]),
        "Learning rate over the run": _flat(trainer["scheduler"]),
        **({"LoRA": _flat(lora)} if lora is not None else {}),
    }


def _flat(section: Mapping[str, Any] | None) -> str:
    """`type, key = value, ...`, without what is not set."""
    if section is None:
        return ""
    parts = [f"{k} = {v}" for k, v in section.items() if k != "type" and v not in (None, False, [], {})]
    return ", ".join([*([str(section["type"])] if "type" in section else []), *parts])


def _training_rewards(run: Path, step: int) -> TrainingRewards | None:
    known = read_run(run / "metrics.jsonl").values("orchestrator/reward/mean")
    rewards = [reward for number, reward in known.items() if number < step]
    steps = min(_MOST_STEPS, len(rewards) // 2)
    if steps == 0:
        return None
    first, last = (statistics.fmean(part) for part in (rewards[:steps], rewards[-steps:]))
    return TrainingRewards(steps=steps, first=first, last=last)


def _validation_losses(run: Path, step: int) -> tuple[float | None, float | None] | None:
    metrics = read_run(run / "metrics.jsonl")
    if not {0, step} <= metrics.of("validation").keys():
        return None
    losses = metrics.values("validation/val_loss")
    return losses.get(0), losses.get(step)


def _versions() -> dict[str, str]:
    installed = {
        d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]
    }
    return {"Python": platform.python_version(), **{n: installed[n] for n in _LIBRARIES if n in installed}}
