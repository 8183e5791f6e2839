"""Certify and attack the environments of reasoning-gym, textarena and skyrl-gym.

    python -m benchmarks.survey [LIBRARY ...] [--folder DIR]

Rows go to `benchmarks/results/environments.jsonl`; `make reference` makes docs/reference/environments.md of
them. Environments with a row are not tried again: delete rows to repeat them. Install the libraries with
`buckeye env install`. skyrl-gym has no tasks, so this program makes some.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from buckeye.evaluation.certify.survey import SurveyOptions, environments_of, survey

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "environments.jsonl"
LIBRARIES = ("reasoning-gym", "textarena", "skyrl-gym")
ARGS = {"reasoning-gym": {"size": 400, "eval_size": 50}}
TASKS = 300
FORMATS = {
    "aime": "End with this line:\nAnswer: N",
    "lcb": "Write a Python program in ```python blocks.",
    "search": "Put the number in <answer>N</answer>.",
    "text2sql": "Think in <think>...</think>, and put the query in <solution>SELECT ...</solution>.",
}


def options(library: str, args: dict[str, Any] | None = None) -> SurveyOptions:
    """Return the options of a library's environments."""
    given = ARGS.get(library, {}) if args is None else args
    return SurveyOptions(args=given, attack=60.0, gradings=4_000, budget=5.0, sessions=20, timeout=240.0)


def skyrl_args(env_id: str, folder: Path) -> dict[str, Any]:
    """Write tasks for an environment of skyrl-gym, and return its arguments."""
    name = env_id.partition("/")[2]
    config: dict[str, Any] = {}
    if name.startswith("search"):
        config = {"search_url": "http://127.0.0.1:9/retrieve", "topk": 3, "timeout": 5, "log_requests": False}
    if name == "text2sql":
        config = {"db_path": str(folder)}
        make_database(folder / "spider" / "database" / "people" / "people.sqlite")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in skyrl_tasks(name)), encoding="utf-8")
    return {"tasks": str(path), "env_config": config}


def skyrl_tasks(name: str) -> Iterator[dict[str, Any]]:
    """Yield tasks: additions, or queries of an age."""
    rng = random.Random(0)
    for number in range(TASKS):
        first, second = rng.randrange(100, 1000), rng.randrange(100, 1000)
        question = f"Anna has {first} apples and picks {second} more. How many apples has she?"
        answer = truth = str(first + second)
        data: Any = {}
        if name == "text2sql":
            question, data = f"The table people has id, name and age. How old is Anna {number}?", "spider"
            answer = truth = f"SELECT age FROM people WHERE name = 'Anna {number}'"
        if name == "lcb":
            question = f"Read a number, and print the number times {first} plus {second}."
            answer = f"```python\nprint(int(input()) * {first} + {second})\n```"
            tests = ((given, given * first + second) for given in (2, 7))
            truth = json.dumps(
                [{"input": f"{given}\n", "output": f"{out}\n", "testtype": "stdin"} for given, out in tests]
            )
        spec = {"ground_truth": {"target": [truth]} if name == "search" else truth}
        form = FORMATS.get(name, "End with this line:\n#### N")
        yield {
            "prompt": [{"role": "user", "content": f"{question} {form}"}],
            "reward_spec": spec,
            "reward_model": spec,
            "answer": answer,
            "max_turns": 2,
            "db_id": "people",
            "data": data,
        }


def make_database(path: Path) -> None:
    """Write a database with the ages of people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    rng = random.Random(1)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE people (id INTEGER, name TEXT, age INTEGER)")
        people = [(number, f"Anna {number}", rng.randrange(1, 100)) for number in range(TASKS)]
        database.executemany("INSERT INTO people VALUES (?, ?, ?)", people)


def main(argv: Sequence[str] | None = None) -> None:
    """Survey the libraries, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=LIBRARIES)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "survey")
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = given.folder / "survey.jsonl"
    rows.write_text(ROWS.read_text("utf-8"), encoding="utf-8")
    for library in given.libraries:
        ids = environments_of(library)
        for env_id in ids:
            args = skyrl_args(env_id, given.folder) if library == "skyrl-gym" else None
            survey([env_id], given.folder, options(library, args), lambda text: print(text, flush=True))
            ROWS.write_text(rows.read_text("utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
