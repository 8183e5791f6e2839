"""Use a tool: an MCP server of a shop, and tasks that ask for the price of a fruit.

`python task.py serve` runs the server; `python task.py` writes the tasks, the configuration and chats of a
beginner to `outputs/`. The beginner often asks for another fruit, and often reports another price.
"""

import json
import random
import sys
from pathlib import Path

from mcp.server import MCPServer

FRUITS = ("pear", "plum", "fig", "kiwi", "lime", "date")
DAYS = range(1, 10)
KNOWN = 0.6  # share of fruits, days and prices that the beginner gets right
PORT = 8771
CONFIG = {
    "system_prompt": 'Tool: <tool>price("fig", 3)</tool>',
    "parser": {"use_thinking": False},
    "action_mappings": {
        "price": {
            "_tool": "price",
            "_parser": {"positional": ["fruit", "day"]},
            "fruit": {"from_arg": "fruit"},
            "day": {"from_arg": "day"},
        }
    },
    "rubric": {"weights": {"task_completion": 1, "tool_execution": 0, "format_compliance": 0}},
    "grade": [
        {"calls": {"tool": "price", "arguments": {"fruit": "{metadata.fruit}", "day": "{metadata.day}"}}},
        {"reply": {"exact": "{metadata.price}"}},
    ],
    "defaults": {"max_turns": 2},
}
server = MCPServer("shop")


@server.tool()
def price(fruit: str, day: int) -> str:
    """Return the price of a fruit on a day."""
    return str(random.Random(f"{fruit}/{day}").randint(1, 9))


def task(fruit, day):
    """Return the task of a fruit and a day."""
    return {
        "prompt": f'What is the price of "{fruit}" on day {day}?',
        "mcp_config": {"shop": {"url": f"http://127.0.0.1:{PORT}/mcp"}},
        "metadata": {"fruit": fruit, "day": day, "price": price(fruit, day)},
    }


def chat(asked, draw):
    """Return the conversation of a beginner."""

    def attempt(right, others):
        return right if draw.random() < KNOWN else draw.choice(others)

    wanted = asked["metadata"]
    fruit, day = attempt(wanted["fruit"], FRUITS), attempt(wanted["day"], DAYS)
    result = price(fruit, day)
    turns = [
        ("system", CONFIG["system_prompt"]),
        ("user", asked["prompt"]),
        ("assistant", f'<tool>price("{fruit}", {day})</tool>'),
        ("user", f"<result>\n{result}\n</result>"),
        ("assistant", attempt(result, "123456789")),
    ]
    return [{"role": role, "content": text} for role, text in turns]


def main():
    """Write the files."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    tasks = [task(fruit, day) for fruit in FRUITS for day in DAYS]
    (out / "tasks.json").write_text(json.dumps(tasks, indent=1))
    (out / "config.yaml").write_text(json.dumps(CONFIG, indent=1))
    with open(out / "chats.jsonl", "w") as chats:
        for _ in range(4_000):
            chats.write(json.dumps({"messages": chat(draw.choice(tasks), draw)}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        server.run("streamable-http", port=PORT, stateless_http=True)
    else:
        main()
