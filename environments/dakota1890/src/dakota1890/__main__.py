"""`python -m dakota1890 demonstrations OUT.jsonl --count N`: write chats to warm-start a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from buckeye.base.storage import write_file
from buckeye.errors import BuckeyeError
from dakota1890.environment import load_environment
from dakota1890.families import FAMILIES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        count = write_demonstrations(options)
    except (BuckeyeError, OSError) as error:
        sys.stderr.write(f"{getattr(error, 'text', f'error: {error}')}\n")
        return getattr(error, "exit_code", 1)
    sys.stdout.write(f"{count} demonstrations written to {options.out}\n")
    return 0


def write_demonstrations(options: argparse.Namespace) -> int:
    """Write `{"messages": [...]}` rows of the train split, one JSON object per line; return their number."""
    environment = load_environment(
        families=options.families,
        depths=options.depths,
        hints=options.hints,
        invented=options.invented,
        invented_fraction=options.invented_fraction,
        seed=options.seed,
        num_train=options.count,
    )
    rows = [{"messages": list(chat)} for chat in environment.demonstrations(options.split)]
    write_file(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dakota1890", description="Tools of the Dakota environment."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "demonstrations", help="write train questions with their answers as chat JSONL"
    )
    command.add_argument("out", type=Path, metavar="OUT.jsonl")
    command.add_argument("--count", type=int, required=True, help="number of rows")
    command.add_argument("--seed", type=int, default=0, help="seed of the train sequence (default 0)")
    command.add_argument(
        "--families", type=_names, help=f"comma-separated names of {','.join(FAMILIES)} (default: all)"
    )
    command.add_argument("--depths", type=_numbers, help="comma-separated numbers of 1,2,3,4 (default: all)")
    command.add_argument(
        "--hints",
        choices=("rule", "none"),
        default="rule",
        help="add the rule to each question, or not (default: rule)",
    )
    command.add_argument("--invented", action="store_true", help="also ask about invented words")
    command.add_argument(
        "--invented-fraction", type=float, default=0.5, help="share of invented words (default 0.5)"
    )
    command.add_argument(
        "--split", default="train", help="only train is allowed; the other splits must stay unseen"
    )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in _names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers separated by commas, such as 1,2"
        ) from None


if __name__ == "__main__":
    raise SystemExit(main())
