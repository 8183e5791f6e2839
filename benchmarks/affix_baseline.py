"""Measure the score of one memorized affix on dakota1890: the best prefix and ending on the prompt's word.

    python benchmarks/affix_baseline.py [--families conjugate,possess]

The policy is not content-free: it has learned one thing, and never reads the question. Prints for each family
and held-out split the best pair, chosen there, and its exact match.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

from dakota1890.families import FAMILIES
from dakota1890.grading import grade
from dakota1890.questions import FORM, WORD, WORDS
from dakota1890.tasks import DEPTHS, Item, eval_tasks

PREFIXES = (
    "", "wa", "ya", "uŋ", "ma", "ni", "ći", "wića", "mi", "mita", "nita", "ta", "uŋkita", "ki", "kići",
    "wo", "o", "md", "d", "waŋna ",
)  # fmt: skip
ENDINGS = (
    "", "pi", "ku", "tku", "ya", "haŋ", "daŋ", " kta", " šni", "pi kta", "pi šni", " nuŋ", " wo", " po",
    " kiŋ", " tawa", " akihde", "na",
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated (default: all)")
    families = tuple(parser.parse_args().families.split(","))
    cells: dict[tuple[str, str], list[Item]] = defaultdict(list)
    for item in eval_tasks(families, DEPTHS, False):
        cells[item.data["family"], item.data["split"]].append(item)
    print("| family | split | tasks | best affix | exact |\n|---|---|---:|---|---:|")
    for (family, split), items in sorted(cells.items()):
        name, exact = best_affix(items)
        print(f"| {family} | {split} | {len(items)} | {name} | {exact:.2f} |")


def best_affix(items: Sequence[Item]) -> tuple[str, float]:
    """Return the best pair, written `wa-...-pi`, and its exact match over all `items`."""
    policies: dict[str, Callable[[str], str]] = {
        f"{before}…{after}": lambda word, before=before, after=after: before + word + after  # type: ignore[misc]
        for before, after in product(PREFIXES, ENDINGS)
        if before or after
    }
    scores = {name: exact_match(items, write) for name, write in policies.items()}
    best = max(scores, key=lambda name: scores[name])
    return (best if scores[best] else "none"), scores[best]


def exact_match(items: Sequence[Item], write: Callable[[str], str]) -> float:
    """Return the share of `items` whose first shown word, changed by `write`, is correct."""
    asked = [
        item for item in items if item.data["answer"] in (FORM, WORD, WORDS) and item.data["prompt_forms"]
    ]
    right = [
        grade(f"<answer>{write(item.data['prompt_forms'][0])}</answer>", item.data, shaping=False).reward
        for item in asked
    ]
    return sum(reward == 1.0 for reward in right) / len(items)


if __name__ == "__main__":
    main()
