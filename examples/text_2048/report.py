"""Print the mean scores of evaluations on the held-out boards with 95 % intervals, and a random baseline.

    python report.py DIRECTORY [RUN ...]

A RUN is a folder of `buckeye eval` in DIRECTORY. The first row is a policy with random moves on the same
boards: its mean over many games on each.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

from prepare import HERE, SIZE, SPLITS, TARGET

from buckeye.mcp.config import load_gym_config
from text_2048.board import DIRECTIONS, Game
from text_2048.grading import grade

RESAMPLES = 2_000
RANDOM_GAMES = 20


def random_score(seed: int, turns: int) -> float:
    """Return the mean score of random moves on a board."""
    return statistics.fmean(_random_game(seed, turns, number) for number in range(RANDOM_GAMES))


def _random_game(seed: int, turns: int, number: int) -> float:
    game, rng = Game(seed, SIZE), random.Random(f"{seed}/{number}")
    for _ in range(turns):
        if game.is_over:
            break
        game.move(rng.choice(DIRECTIONS))
    return grade(game, "max_number", target=TARGET)


def evaluate_scores(folder: Path) -> list[float]:
    """Return the scores of the games of a model. Exit if games failed."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    scores = [row["components"]["task_completion"] for row in rows if row.get("error") is None]
    if len(scores) < len(rows):
        failed = f"{len(rows) - len(scores)} of {len(rows)} games failed"
        sys.exit(f"error: {folder}: {failed}\nhint: Run `buckeye eval --resume`")
    return [float(score) for score in scores]


def interval(scores: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over games."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(scores, k=len(scores))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def main() -> None:
    """Print a row for every policy."""
    directory = Path(sys.argv[1])
    turns = load_gym_config(HERE / "2048.yaml").defaults.max_turns
    policies = {"random moves": [random_score(seed, turns) for seed in SPLITS["eval"]]}
    policies |= {name: evaluate_scores(directory / name) for name in sys.argv[2:]}
    for name, scores in policies.items():
        low, high = interval(scores)
        print(f"{name:14} {statistics.fmean(scores):.3f}  [{low:.3f}, {high:.3f}]  {len(scores)} boards")


if __name__ == "__main__":
    main()
