"""Compare `rl tune` with a grid of learning rates, and run the sanity test of arXiv 2510.26788.

    python -m benchmarks.tune [TASK ...] [--seeds 0 1 2] [--folder DIR]

The tasks are two recipes of benchmarks/recipes.py and the game in benchmarks/guess.py. The measure is the
number of steps until the mean reward of five steps has reached a target, as the median over seeds. The best
rate of the grid is the one with the fewest steps. `rl tune` then starts at 30 times that rate and at a 30th
of it, with the first seed only, and its rate is trained with all seeds.

The sanity test uses the rate that `rl tune` finds. Its questions are those that the model answers correctly
20 to 80 % of the time, and it must reach more than 95 %. Everything runs in one process; existing results are
reused.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from unittest import mock

from benchmarks.letters import LETTERS, questions
from benchmarks.recipes import RECIPES, Chat, warm_start, write_settings
from tests.setup.tuning.here import carry_out, play

from benchmarks import guess
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


def guesses(seed: int) -> Iterator[Chat]:
    """Return games of a player who guesses random letters."""
    draw = random.Random(seed)
    for _ in range(1200):
        said = [guess.QUESTION, draw.choice(LETTERS), "no", draw.choice(LETTERS), "no", draw.choice(LETTERS)]
        roles = cycle(["user", "assistant"])
        yield [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


CAPITAL = RECIPES["capitals"]
TASKS = {
    "emit": (RECIPES["letters"], 0.9),
    "capitals": (CAPITAL, 0.6),
    "guess": (
        replace(RECIPES["letters"], chats=guesses, env=guess.__file__, args={}, tokens=4),
        0.6,
    ),
}
"""Recipe of each task, and the reward to reach."""
SANITY = "sanity"
ASKED = RECIPES[SANITY]


def settings(folder: Path, *words: str, steps: int = MOST) -> RLConfig:
    """Return the settings of a task, with changes."""
    files = ["@", str(folder / "rl.toml"), "--log.level", "error", "--max-steps", str(steps)]
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


def solved_now_and_then(folder: Path) -> list[str]:
    """Return the questions that the model answers neither always nor never."""
    rewards(folder, "still", 0, "--trainer.optim.lr", "1e-12", steps=STILL)
    groups = runs.open(folder / "still-0").query(
        "SELECT task, avg(reward) FROM rollouts WHERE retried = 0 GROUP BY split, step, env, grp, dropped"
    )
    asked, earned = (
        [question for question, _ in questions("capital", 512)],
        defaultdict[str, list[float]](list),
    )
    for task, mean in groups:
        earned[asked[int(task.rpartition("-")[2])]].append(mean)
    low, high = SOLVED
    return sorted(question for question, each in earned.items() if low <= statistics.fmean(each) <= high)


def sanity(folder: Path, seeds: list[int]) -> None:
    """Print the share of correct answers in the last steps, in which the rate has decayed to almost 0."""
    only, start = solved_now_and_then(folder), folder / "sft" / "weights" / f"step_{ASKED.warm}"
    write_settings(replace(ASKED, args={**ASKED.args, "only": only}), folder, start, 0)
    falling = ("--trainer.scheduler.decay", str(LONG))
    setting = tuned(folder, FAR * GRID[2], *falling, steps=LONG)
    print(f"{len(only)} questions; {shown(setting)}", flush=True)
    for seed in seeds:
        earned = rewards(folder, "tuned", seed, *falling, "@", str(setting), steps=LONG)
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
        folder = given.folder.absolute() / name
        recipe, target = TASKS["capitals" if name == SANITY else name]
        if not (folder / "rl.toml").exists():
            write_settings(recipe, folder, warm_start(recipe, folder, 0), 0)
        print(f"\n{name}", flush=True)
        if name == SANITY:
            sanity(folder, given.seeds)
        else:
            against_grid(folder, target, given.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
