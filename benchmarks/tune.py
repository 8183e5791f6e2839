"""Compare `rl tune` with a grid of learning rates, and run the sanity test of arXiv 2510.26788.

    python -m benchmarks.tune [TASK ...] [--seeds 0 1 2] [--folder DIR]

The tasks are three recipes. The measure is the number of steps until the mean reward of five steps has
reached a target, as the median over seeds. The best rate of the grid is the one with the fewest steps.
`rl tune` then starts at 30 times that rate and at a 30th of it, with the first seed only, and its rate is
trained with all seeds.

The sanity test uses the rate that `rl tune` finds. Its questions are those that the model answers correctly
20 to 80 % of the time, and it must reach more than 95 %. Everything runs in one process; existing results are
reused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from unittest import mock

from benchmarks.recipes import RECIPES, prepare
from tests.setup.tuning.here import carry_out, play

from buckeye import runs
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.setup.tuning import forks
from buckeye.setup.tuning.tune import Tuning

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MOST, STILL, LONG = 36, 8, 300  # steps
BUDGET = 600.0  # seconds of `rl tune`
WINDOW, LAST = 5, 20
FAR = 30.0
SOLVED = (0.2, 0.8)  # of the answers to a question that is neither easy nor hard
PASSED = 0.95


TASKS = {"letters": 0.9, "alphabet-sort": 0.9, "sft-then-rl": 0.6}
"""Reward to reach."""
SANITY, OF_SANITY = "sanity", "sft-then-rl"


def settings(folder: Path, *words: str, steps: int = MOST) -> RLConfig:
    """Return the settings of a task, with changes."""
    file = folder / "run.toml"
    model = folder / tomllib.loads(file.read_text())["model"]["name"]
    files = ["@", str(file), "--model.name", str(model), "--log.level", "error", "--max-steps", str(steps)]
    return load_config(RLConfig, [*files, *words])


def rewards(folder: Path, run: str, seed: int, *words: str, steps: int = MOST) -> list[float]:
    """Return a run's reward by step; run it if results are missing."""
    out = folder / f"{run}-{seed}"
    words += ("--output-dir", str(out), "--orchestrator.seed", str(seed))
    if not (out / "weights" / f"step_{steps}").is_dir():
        shutil.rmtree(out, ignore_errors=True)
        carry_out(settings(folder, *words, steps=steps))
    return [step.reward for step in runs.open(out).steps if step.reward is not None]


def steps_to(target: float, earned: list[float]) -> float:
    """Return the steps until the mean of the last ones has reached the target; infinite if it has not."""
    ends = range(WINDOW, len(earned) + 1)
    return next((end for end in ends if statistics.fmean(earned[end - WINDOW : end]) >= target), math.inf)


def tuned(folder: Path, start: float, *words: str, steps: int = MOST) -> Path:
    """Return the file that `rl tune` writes."""
    root = folder / f"tune-{start:.1e}"
    if not (root / "tuned.toml").exists():
        shutil.rmtree(root, ignore_errors=True)
        config = settings(folder, *words, "--trainer.optim.lr", str(start), steps=steps)
        tuning = Tuning(config=config, root=root, budget=BUDGET, tell=print)
        with mock.patch.object(forks, "_run_command", play):
            tuning.run()
    return root / "tuned.toml"


def shown(file: Path) -> str:
    """Return the learning rate of a settings file."""
    return f"{tomllib.loads(file.read_text())['trainer']['optim']['lr']:.1e}"


def against_grid(folder: Path, target: float, seeds: list[int]) -> None:
    """Print a line for each rate, and for `rl tune` from a rate far too high and one far too low."""

    def line(what: str, run: str, *words: str) -> float:
        each = [steps_to(target, rewards(folder, run, seed, *words)) for seed in seeds]
        middle = statistics.median(each)
        print(f"{what:30} {middle:5} {each}", flush=True)
        return middle

    grid = {rate: line(f"{rate:.0e}", f"grid-{rate:.0e}", "--trainer.optim.lr", str(rate)) for rate in GRID}
    best = min(grid, key=lambda rate: grid[rate])
    if grid[best] == math.inf:
        print("no rate reaches the target", flush=True)
        return
    for start in (best * FAR, best / FAR):
        file = tuned(folder, start)
        found = line(f"tuned from {start:.1e}: {shown(file)}", f"tuned-{start:.1e}", "@", str(file))
        print(f"  {found / grid[best]:.2f} times the best of the grid", flush=True)


def half_solved(folder: Path) -> Path:
    """Write the prompts that the model answers neither always nor never; return their file."""
    rewards(folder, "still", 0, "--trainer.optim.lr", "1e-12", steps=STILL)
    groups = runs.open(folder / "still-0").query(
        "SELECT task, avg(reward) FROM rollouts WHERE retried = 0 GROUP BY split, step, env, grp, dropped"
    )
    earned = defaultdict[int, list[float]](list)
    for task, mean in groups:
        earned[int(task)].append(mean)
    low, high = SOLVED
    rows = (folder / "outputs" / "prompts.jsonl").read_text().splitlines(keepends=True)
    kept = [rows[task] for task, means in sorted(earned.items()) if low <= statistics.fmean(means) <= high]
    file = folder / "outputs" / "half_solved.jsonl"
    file.write_text("".join(kept))
    print(f"{len(kept)} questions", flush=True)
    return file


def sanity(folder: Path, seeds: list[int]) -> None:
    """Print the share of correct answers in the last steps, in which the rate has decayed to almost 0."""
    args = {"path": str(half_solved(folder)), "reward": "exact"}
    words = ("--orchestrator.batch-size", "256", "--orchestrator.rollouts-per-example", "16")
    words += ("--trainer.scheduler.type", "linear", "--trainer.scheduler.decay", str(LONG))
    words += ("--orchestrator.env.0.args", json.dumps(args))
    setting = tuned(folder, FAR * GRID[2], *words, steps=LONG)
    print(shown(setting), flush=True)
    for seed in seeds:
        earned = rewards(folder, "tuned", seed, *words, "@", str(setting), steps=LONG)
        last = statistics.fmean(earned[-LAST:])
        print(f"seed {seed}: from {earned[0]:.3f} to {last:.4f}", last > PASSED, flush=True)


def main() -> int:
    """Run what is missing, and print the tables."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", default=[*TASKS, SANITY])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("outputs/tune"))
    given = parser.parse_args()
    os.environ["BUCKEYE_THREADS"] = "1"
    for name in given.tasks:
        recipe = OF_SANITY if name == SANITY else name
        folder = given.folder.absolute() / name
        prepare(RECIPES / recipe, folder)
        print(f"\n{name}", flush=True)
        if name == SANITY:
            sanity(folder, given.seeds)
        else:
            against_grid(folder, TASKS[name], given.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
