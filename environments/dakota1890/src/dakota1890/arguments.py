"""The arguments of `load_environment`, the same behind every face."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from dakota1890.errors import ArgumentError
from dakota1890.families import FAMILIES
from dakota1890.tasks import DEPTHS, TaskOptions

NUM_TRAIN = 100_000

_NAMES = ", ".join(FAMILIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Checked arguments."""

    options: TaskOptions
    num_train: int
    num_eval: int | None
    shaping: bool


def checked_arguments(
    *,
    families: Sequence[str] | None,
    depths: Sequence[int] | None,
    hints: str,
    invented: bool,
    invented_fraction: float,
    seed: int,
    num_train: int,
    num_eval: int | None,
    shaping: bool,
) -> Arguments:
    """The arguments as one value. Raises ArgumentError for one outside what `load_environment` says, or of
    another type."""
    if hints not in ("rule", "none"):
        raise ArgumentError(f'dakota1890: `hints` is "rule" or "none", not {hints!r}.')
    _check_fraction("invented_fraction", invented_fraction)
    _check_switch("invented", invented)
    _check_switch("shaping", shaping)
    _check_whole("seed", seed)
    _check_whole("num_train", num_train, least=1)
    if num_eval is not None:
        _check_whole("num_eval", num_eval, least=1)
    options = TaskOptions(
        families=_checked_families(families),
        depths=_checked_depths(depths),
        hint=hints == "rule",
        invented_fraction=invented_fraction if invented else 0.0,
        seed=seed,
    )
    return Arguments(options=options, num_train=num_train, num_eval=num_eval, shaping=shaping)


def check_tool_arguments(*, tools: bool, max_calls: int) -> None:
    """Raise ArgumentError unless the arguments about the tools can be used."""
    _check_switch("tools", tools)
    _check_whole("max_calls", max_calls, least=1)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"dakota1890: `{name}` is true or false, without quotes, not {value!r}.")


def _check_whole(name: str, value: object, *, least: int | None = None) -> None:
    if not _is_whole(value) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"dakota1890: `{name}` is a whole number{bound}, without quotes, not {value!r}.")


def _check_fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ArgumentError(f"dakota1890: `{name}` is a number between 0 and 1, not {value!r}.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    if families is None:
        return tuple(FAMILIES)
    if isinstance(families, str):
        raise ArgumentError(_not_a_list_of_families(families))
    if not isinstance(families, Sequence) or not families:
        raise ArgumentError(
            f"dakota1890: `families` is a list with at least one of {_NAMES}, not {families!r}."
        )
    for family in families:
        if not isinstance(family, str) or family not in FAMILIES:
            raise ArgumentError(
                f"dakota1890: unknown family {family!r}; there are {_NAMES}.{_did_you_mean(family)}"
            )
    return tuple(dict.fromkeys(families))


def _not_a_list_of_families(text: str) -> str:
    """What to write instead of one text."""
    given = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in given if part not in FAMILIES]
    meant = [_closest(part) or part for part in given] or [next(iter(FAMILIES))]
    shown = ", ".join(f'"{name}"' for name in meant)
    return (
        f"dakota1890: `families` is a list of names, not the text {text!r}; there are {_NAMES}."
        f"{_did_you_mean(unknown[0]) if unknown else ''} Write families=[{shown}], or on a command line "
        f"--arg 'families={','.join(meant)}{',' * (len(meant) == 1)}'."
    )


def _did_you_mean(name: object) -> str:
    close = _closest(name)
    return f" Did you mean {close!r}?" if close else ""


def _closest(name: object) -> str | None:
    """The family whose name is most like this."""
    return next(iter(difflib.get_close_matches(str(name), FAMILIES, 1)), None)


def _checked_depths(depths: Sequence[int] | None) -> tuple[int, ...]:
    if depths is None:
        return DEPTHS
    listed = isinstance(depths, Sequence) and not isinstance(depths, str) and len(depths) > 0
    if not listed or not all(_is_whole(depth) and depth in DEPTHS for depth in depths):
        raise ArgumentError(
            f"dakota1890: `depths` is a list of whole numbers from {DEPTHS[0]} to {DEPTHS[-1]}, not "
            f"{depths!r}. Write depths=[1, 2], or on a command line --arg 'depths=[1, 2]'."
        )
    return tuple(sorted(set(depths)))
