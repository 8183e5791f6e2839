"""Writes what the example needs: tasks, and conversations of a player who moves at random.

    python prepare.py DIRECTORY

The conversations teach the format of a call and nothing about the game. What such a player earns on the
held-out boards is printed: it is the floor.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from buckeye.envs.mcp.config import GymConfig, load_gym_config
from buckeye.envs.mcp.rollout import first_messages
from buckeye.tasks.models import McpTask
from text_2048.board import DIRECTIONS, Game
from text_2048.grading import grade

HERE = Path(__file__).parent
SIZE, TARGET = 3, 64
SPLITS = {"train": range(2_000), "eval": range(100_000, 100_128)}
CONVERSATIONS = range(200_000, 203_000)


def task(split: str, seed: int) -> dict[str, Any]:
    """One board as a task."""
    return {
        "id": f"{split}-{seed}",
        "prompt": "Begin.",
        "mcp_config": {"text_2048": {"command": "text-2048"}},
        "setup_tool": {"name": "setup", "arguments": {"name": "board", "seed": seed, "board_size": SIZE}},
        "evaluate_tool": {"name": "evaluate", "arguments": {"name": "max_number", "target": TARGET}},
        "metadata": {"split": split, "seed": seed},
    }


def conversation(config: GymConfig, seed: int) -> dict[str, Any]:
    """A game of random moves, in the words of a rollout. Illegal moves are not among them."""
    game, rng = Game(seed, SIZE), random.Random(seed)
    messages = [*first_messages(McpTask.model_validate(task("train", seed)), config, str(game))]
    for _ in range(config.defaults.max_turns):
        if game.over:
            break
        direction = rng.choice(game.legal_moves)
        game.move(direction)
        messages.append({"role": "assistant", "content": f'<tool>move("{direction}")</tool>'})
        messages.append({"role": "user", "content": f"<result>\n{game}\n</result>"})
    return {"messages": messages[:-1]}


def random_score(config: GymConfig, seed: int, *, legal_only: bool) -> float:
    """What a player earns who draws from all directions, or from the legal ones."""
    game, rng = Game(seed, SIZE), random.Random(seed)
    for _ in range(config.defaults.max_turns):
        if game.over:
            break
        game.move(rng.choice(game.legal_moves if legal_only else DIRECTIONS))
    return grade(game, "max_number", target=TARGET)


def main() -> None:
    """Write the files and print the floor."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    config = load_gym_config(HERE / "2048.yaml")
    tasks = [task(split, seed) for split, seeds in SPLITS.items() for seed in seeds]
    (directory / "tasks.json").write_text(json.dumps(tasks, indent=1))
    chats = [json.dumps(conversation(config, seed)) for seed in CONVERSATIONS]
    (directory / "chats.jsonl").write_text("".join(f"{line}\n" for line in chats))
    texts = [" ".join(m["content"] for m in json.loads(line)["messages"]) for line in chats[:500]]
    (directory / "corpus.txt").write_text("\n".join(text.replace("\n", " ") for text in texts))
    for name, legal_only in (("random moves", False), ("random legal moves", True)):
        scores = [random_score(config, seed, legal_only=legal_only) for seed in SPLITS["eval"]]
        error = 1.96 * statistics.stdev(scores) / len(scores) ** 0.5
        print(f"{name}: {statistics.fmean(scores):.4f} ± {error:.4f} on {len(scores)} held-out boards")


if __name__ == "__main__":
    main()
