"""What the games on the held-out boards say: mean evaluate score with 95 % intervals, and the floor.

    python report.py DIRECTORY [RUN ...]

A RUN is a folder that `buckeye eval` has written in DIRECTORY. The first row is a player who draws each move
from all four directions, on the same boards: his mean of many games on each.
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
    """What a player earns on a board who moves at random."""
    return statistics.fmean(_random_game(seed, turns, number) for number in range(RANDOM_GAMES))


def _random_game(seed: int, turns: int, number: int) -> float:
    game, rng = Game(seed, SIZE), random.Random(f"{seed}/{number}")
    for _ in range(turns):
        if game.is_over:
            break
        game.move(rng.choice(DIRECTIONS))
    return grade(game, "max_number", target=TARGET)


def evaluate_scores(folder: Path) -> list[float]:
    """The grades of the games that a model played. Exits if some have none."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    played = [row["components"]["task_completion"] for row in rows if row.get("error") is None]
    if len(played) < len(rows):
        sys.exit(f"{folder}: {len(rows) - len(played)} of {len(rows)} games failed: buckeye eval --resume")
    return [float(score) for score in played]


def interval(scores: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean by the bootstrap over games."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(scores, k=len(scores))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def main() -> None:
    """Print a row for every player."""
    directory = Path(sys.argv[1])
    turns = load_gym_config(HERE / "2048.yaml").defaults.max_turns
    players = {"random moves": [random_score(seed, turns) for seed in SPLITS["eval"]]}
    players |= {name: evaluate_scores(directory / name) for name in sys.argv[2:]}
    for name, scores in players.items():
        low, high = interval(scores)
        print(f"{name:14} {statistics.fmean(scores):.3f}  [{low:.3f}, {high:.3f}]  {len(scores)} boards")


if __name__ == "__main__":
    main()
