"""Write tasks of 2048, the configuration, and games of beginners to `outputs/`.

Every beginner has a habit, and ignores the board. Half of them repeat the last direction most of the time,
the others turn (left or right after up or down), which merges more tiles.
"""

import json
import random
from pathlib import Path

from text_2048.board import DIRECTIONS, Game

SIZE, TARGET, TURNS = 3, 8, 6
HABIT = 0.95  # share of moves by habit; the others are random
CONFIG = {
    "system_prompt": 'Play 2048: <tool>move("up")</tool>, "down", "left" or "right".',
    "parser": {"use_thinking": False},
    "action_mappings": {
        "move": {
            "_tool": "move",
            "_parser": {"positional": ["direction"]},
            "direction": {"from_arg": "direction"},
        }
    },
    "rubric": {"weights": {"task_completion": 1, "tool_execution": 0, "format_compliance": 0}},
    "defaults": {"max_turns": TURNS},
}


def task(seed):
    """Return the task of a board. Its reward is 1 if a tile reaches TARGET, else 0."""
    return {
        "prompt": "Begin.",
        "mcp_config": {"text_2048": {"command": "text-2048"}},
        "setup_tool": {"name": "setup", "arguments": {"name": "board", "seed": seed, "board_size": SIZE}},
        "evaluate_tool": {"name": "evaluate", "arguments": {"name": "max_number", "target": TARGET}},
    }


def chat(seed):
    """Return a game of a beginner, in the format of a rollout."""
    game, draw = Game(seed, SIZE), random.Random(seed)
    messages = [
        {"role": "system", "content": CONFIG["system_prompt"]},
        {"role": "user", "content": f"Begin.\n\n{game}"},
    ]
    is_turning, direction = draw.random() < 0.5, draw.choice(DIRECTIONS)
    for _ in range(TURNS):
        across = ("left", "right") if direction in ("up", "down") else ("up", "down")
        habitual = across if is_turning else (direction,)
        direction = draw.choice(habitual if draw.random() < HABIT else DIRECTIONS)
        messages.append({"role": "assistant", "content": f'<tool>move("{direction}")</tool>'})
        messages.append({"role": "user", "content": f"<result>\n{result(game, direction)}\n</result>"})
        if game.is_over:
            break
    return messages[:-1]


def result(game, direction):
    """Return the server's reply to a move."""
    if game.move(direction):
        return str(game)
    legal = ", ".join(game.legal_moves)
    return f"Error executing tool move: no tile can move {direction}. These directions can: {legal}"


def main():
    """Write the files."""
    out = Path("outputs")
    out.mkdir(exist_ok=True)
    (out / "tasks.json").write_text(json.dumps([task(seed) for seed in range(16)], indent=1))
    (out / "config.yaml").write_text(json.dumps(CONFIG, indent=1))
    with open(out / "chats.jsonl", "w") as chats:
        for seed in range(200_000, 203_000):
            chats.write(json.dumps({"messages": chat(seed)}) + "\n")


if __name__ == "__main__":
    main()
