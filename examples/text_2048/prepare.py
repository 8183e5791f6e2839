"""Write the tasks of the example, and conversations of beginners.

    python prepare.py DIRECTORY

The conversations teach the format of a call, and nothing about the board, because every beginner has a habit.
Half of them repeat the last direction most of the time. The other half turn (left or right after up or down).
Both ignore the board.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from buckeye.mcp.config import GymConfig, load_gym_config
from buckeye.mcp.rollout import first_messages
from buckeye.mcp.tasks.task_schema import McpTask
from text_2048.board import DIRECTIONS, Game

HERE = Path(__file__).parent
SIZE, TARGET = 3, 16
HABIT = 0.8  # share of moves by habit; the others are random
SPLITS = {"train": range(4_000), "eval": range(100_000, 101_000)}
CONVERSATIONS = range(200_000, 203_000)
WORDS = ["assistant", "user", "system", "move", "Error"]  # words that follow a tag
SERVER = {
    "url": "http://localhost:8765/mcp",
    "headers": {"Authorization": "Bearer $BUCKEYE_API_KEY", "Mcp-Image": "text-2048:latest"},
}


def task(split: str, seed: int) -> dict[str, Any]:
    """Return the task of a board."""
    return {
        "id": f"{split}-{seed}",
        "prompt": "Begin.",
        "mcp_config": {"text_2048": SERVER},
        "setup_tool": {"name": "setup", "arguments": {"name": "board", "seed": seed, "board_size": SIZE}},
        "evaluate_tool": {"name": "evaluate", "arguments": {"name": "max_number", "target": TARGET}},
        "metadata": {"split": split, "seed": seed},
    }


def conversation(config: GymConfig, seed: int) -> dict[str, Any]:
    """Return a game of a beginner, in the format of a rollout."""
    game, rng = Game(seed, SIZE), random.Random(seed)
    messages = [*first_messages(McpTask.model_validate(task("train", seed)), config, str(game))]
    is_turning, direction = rng.random() < 0.5, rng.choice(DIRECTIONS)
    for _ in range(config.defaults.max_turns):
        habitual = _perpendicular(direction) if is_turning else (direction,)
        direction = rng.choice(habitual if rng.random() < HABIT else DIRECTIONS)
        messages.append({"role": "assistant", "content": f'<tool>move("{direction}")</tool>'})
        messages.append({"role": "user", "content": f"<result>\n{_result(game, direction)}\n</result>"})
        if game.is_over:
            break
    return {"messages": messages[:-1]}


def _perpendicular(direction: str) -> tuple[str, ...]:
    """Return the perpendicular directions."""
    return ("left", "right") if direction in ("up", "down") else ("up", "down")


def _result(game: Game, direction: str) -> str:
    """Return the server's reply to a move."""
    if game.move(direction):
        return str(game)
    legal = ", ".join(game.legal_moves)
    return f"Error executing tool move: no tile can move {direction}. These directions can: {legal}"


def main() -> None:
    """Write the files."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    config = load_gym_config(HERE / "2048.yaml")
    tasks = [task(split, seed) for split, seeds in SPLITS.items() for seed in seeds]
    (directory / "tasks.json").write_text(json.dumps(tasks, indent=1))
    chats = [json.dumps(conversation(config, seed)) for seed in CONVERSATIONS]
    (directory / "chats.jsonl").write_text("".join(f"{line}\n" for line in chats))
    texts = [" ".join(m["content"] for m in json.loads(line)["messages"]) for line in chats[:500]]
    lines = [text.replace("\n", " ") for text in texts] + WORDS * 20
    (directory / "corpus.txt").write_text("\n".join(lines))
    print(f"{directory}: {len(tasks)} tasks and {len(chats)} conversations")


if __name__ == "__main__":
    main()
