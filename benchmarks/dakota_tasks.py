"""Measure how many dakota1890 tasks per second are generated and graded on one core.

    python benchmarks/dakota_tasks.py [--tasks N] [--invented 0.5]

Half of the replies are correct, a quarter is a near miss (one letter off), a quarter another task's answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from dakota1890.families import FAMILIES
from dakota1890.grading import grade
from dakota1890.tasks import Item, TaskOptions, TrainTasks, train_depths


def main() -> None:
    """Print a table: each family alone, then all together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=5_000, help="tasks of each row (default 5,000)")
    parser.add_argument("--invented", type=float, default=0.0, help="share of invented words (default 0)")
    given = parser.parse_args()
    print("| family | generated /s | graded /s | both /s |\n|---|---:|---:|---:|")
    trained = tuple(name for name in FAMILIES if train_depths(name))
    for families in (*((name,) for name in trained), trained):
        made, graded = measure(families, given.tasks, given.invented)
        name = families[0] if len(families) == 1 else "**all**"
        both = 1 / (1 / made + 1 / graded)
        print(f"| {name} | {made:,.0f} | {graded:,.0f} | {both:,.0f} |")


def measure(families: tuple[str, ...], count: int, invented: float) -> tuple[float, float]:
    """Return the tasks generated and the replies graded per second of CPU time, with warm caches."""
    tasks = TrainTasks(TaskOptions(families=families, invented_fraction=invented), 10 * count)
    tasks[: count // 10]
    started = time.process_time()
    items = tasks[count : 2 * count]
    made = count / (time.process_time() - started)
    texts = list(replies(items))
    started = time.process_time()
    for item, text in zip(items, texts, strict=True):
        grade(text, item.data, shaping=True)
    return made, count / (time.process_time() - started)


def replies(items: Sequence[Item]) -> list[str]:
    """Return a reply for each task."""
    answers = [item.data["accept"][0] for item in items]
    mixed = [(answer, answer, f"{answer[:-1]}k", answers[i - 1])[i % 4] for i, answer in enumerate(answers)]
    return [f"<answer>{answer}</answer>" for answer in mixed]


if __name__ == "__main__":
    main()
