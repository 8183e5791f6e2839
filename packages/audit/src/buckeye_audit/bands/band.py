"""The band of a recipe: between which rewards its runs are, step by step, from whole runs with several seeds.

A file in `recipes` has a recipe: what decides its curve, and the rewards of the runs. `benchmarks/bands.py`
makes them anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json, step_directories
from buckeye.launch.resume_checks import settings_apart
from buckeye.monitor.intervals import student_quantile
from buckeye.runs import Run

SMOOTHED = 5
"""Over so many steps the spread between seeds is taken, and a run is judged by the mean of its last ones."""

_SHAPE = ("hidden_size", "num_hidden_layers")
_SIZES = ("orchestrator.batch_size", "orchestrator.rollouts_per_example")
_DECIDE = (
    *("max_async_level", "orchestrator.sampling", "orchestrator.advantage", "orchestrator.zero_spread"),
    *("trainer.optim", "trainer.scheduler", "trainer.loss", "trainer.model.experimental.lora"),
)
_PROMPTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Between which rewards 95 % of the runs of a recipe are in each of `steps`. `rewards` are those of the
    run, None where it has none, and `differs` the settings that decide the curve and are other than the
    recipe's: where there are any, the band only says what they are worth."""

    recipe: str
    steps: tuple[int, ...]
    low: tuple[float, ...]
    mid: tuple[float, ...]
    high: tuple[float, ...]
    rewards: tuple[float | None, ...]
    differs: tuple[str, ...]

    def means(self, places: Sequence[int]) -> tuple[float, float, float, float]:
        """Of some places: what the run earned, and the low, mid and high end of the band."""
        earned = statistics.fmean(reward for at in places if (reward := self.rewards[at]) is not None)
        ends = (statistics.fmean(end[at] for at in places) for end in (self.low, self.mid, self.high))
        low, mid, high = ends
        return earned, low, mid, high

    @property
    def played(self) -> list[int]:
        """The places of the steps that the run has played."""
        return [at for at, reward in enumerate(self.rewards) if reward is not None]

    @property
    def label(self) -> str:
        """What the band is of, for the legend of a chart."""
        other = f" (here otherwise: {', '.join(self.differs)})" if self.differs else ""
        return f"runs of the recipe {self.recipe}{other}"

    @property
    def told(self) -> str:
        """What the run's last steps earned, and what other runs did."""
        places = self.played[-SMOOTHED:]
        earned, low, mid, high = self.means(places)
        return (
            f"In steps {self.steps[places[0]]} to {self.steps[places[-1]]} it earns {earned:.2f}; runs of "
            f"the recipe `{self.recipe}` earn {low:.2f} to {high:.2f}, {mid:.2f} in the middle"
        )

    @property
    def inside(self) -> bool:
        """Whether the run's last steps earned no less than the band's lower end."""
        earned, low, *_ = self.means(self.played[-SMOOTHED:])
        return earned >= low


def band_of(run: Run, until: int | None = None) -> Band | None:
    """The band of the recipe that a run is of, as far as it had come after step `until`. None where it is of
    no known recipe: another environment (its name, and prompts that no run of the recipe had), another size
    of the model (width and layers), of the batch or of a group."""
    rewards = {
        step.number: reward
        for step in run.steps
        if (reward := step.played_reward) is not None and (until is None or step.number <= until)
    }
    shape = _shape(run)
    for name, recipe in _recipes() if rewards and shape is not None else ():
        if (_chosen(run, _SIZES), shape) != (recipe["sizes"], recipe["shape"]) or not _shares_prompts(
            run, recipe
        ):
            continue
        ends = _ends(recipe["rewards"])
        if not any(step < len(ends) for step in rewards):
            continue
        return Band(
            recipe=name,
            steps=tuple(range(len(ends))),
            low=tuple(low for low, _, _ in ends),
            mid=tuple(mid for _, mid, _ in ends),
            high=tuple(high for _, _, high in ends),
            rewards=tuple(rewards.get(step) for step in range(len(ends))),
            differs=tuple(_differs(_deciding(run), recipe["settings"])),
        )
    return None


def recipe_from(runs: Sequence[Run], made_by: str) -> dict[str, Any]:
    """What a file in `recipes` holds, from runs that differ by their seeds alone."""
    first = runs[0]
    prompts = [prompt for (prompt,) in first.query(_PLAYED, *_env(first))]
    return {
        "made_by": made_by,
        "env": _env(first)[0],
        "shape": _shape(first),
        "sizes": _chosen(first, _SIZES),
        "settings": _deciding(first),
        "prompts": prompts[:_PROMPTS],
        "rewards": [
            [round(reward, 4) for step in run.steps if (reward := step.played_reward) is not None]
            for run in runs
        ],
    }


_PLAYED = (
    "SELECT prompt FROM rollouts WHERE split = 'train' AND prompt IS NOT NULL AND env = ? GROUP BY prompt "
    "ORDER BY count(*) DESC, prompt"
)


def _env(run: Run) -> tuple[str]:
    """The name of what is trained on."""
    names = run.query("SELECT env FROM rollouts WHERE split = 'train' GROUP BY env ORDER BY count(*) DESC")
    return (str(names[0][0]),) if names else ("",)


def _shares_prompts(run: Run, recipe: Mapping[str, Any]) -> bool:
    known = set(recipe["prompts"])
    return _env(run) == (recipe["env"],) and any(
        prompt in known for (prompt,) in run.query(_PLAYED, recipe["env"])
    )


def _recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    folder = Path(str(files("buckeye_audit.bands").joinpath("recipes")))
    for file in sorted(folder.glob("*.json")):
        yield file.stem, read_json(file)


def _shape(run: Run) -> dict[str, Any] | None:
    """The width and the layers of the model; None where it is not there any more."""
    named = run.setting("trainer.model.name") or run.setting("model.name")
    there = [*([Path(str(named))] if named else []), *step_directories(run.path / "weights").values()]
    for path in there:
        try:
            sizes = read_json(path / "config.json")
            return {name: sizes[name] for name in _SHAPE}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _chosen(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Some settings, by their names."""
    return {name: run.setting(name) for name in names}


def _deciding(run: Run) -> dict[str, Any]:
    """Those that decide a curve; of the environments' arguments those that are no paths."""
    args = [
        {key: value for key, value in (env.get("args") or {}).items() if "/" not in str(value)}
        for env in run.setting("orchestrator.env") or []
    ]
    return {**_chosen(run, _DECIDE), "orchestrator.env.args": args}


def _differs(these: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The settings that differ. What an earlier or later version has not is not counted."""
    apart = settings_apart(these, others)
    return [name for name, this, other in apart if this is not None and other is not None]


def _ends(rewards: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """For each step the low end, the middle and the high end of where one more run is in 95 % of cases: by
    Student's t from the means and variances of the seeds, these averaged over neighbouring steps."""
    steps = list(zip(*rewards, strict=False))
    seeds, reach = len(rewards), SMOOTHED // 2
    variances = [statistics.variance(step) for step in steps]
    width = student_quantile(seeds - 1) * (1 + 1 / seeds) ** 0.5
    found = list[tuple[float, float, float]]()
    for at, step in enumerate(steps):
        near = variances[max(0, at - reach) : at + reach + 1]
        mid, half = statistics.fmean(step), width * statistics.fmean(near) ** 0.5
        found.append((mid - half, mid, mid + half))
    return found
