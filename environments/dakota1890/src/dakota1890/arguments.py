"""Arguments of `load_environment`, shared by Buckeye and both APIs of `verifiers`."""

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


def check_arguments(
    *,
    families: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    hints: str = "rule",
    invented: bool = False,
    invented_fraction: float = 0.5,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_eval: int | None = None,
    shaping: bool = True,
) -> Arguments:
    """Return the arguments as one value.

    Raises ArgumentError for a value that `load_environment` does not document, or of another type.
    """
    if hints not in ("rule", "none"):
        raise ArgumentError(f'dakota1890: `hints` is "rule" or "none", not {hints!r}.')
    fraction = invented_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 <= fraction <= 1.0:
        raise ArgumentError(
            f"dakota1890: `invented_fraction` is a number between 0 and 1, not {invented_fraction!r}."
        )
    for name, switch in (("invented", invented), ("shaping", shaping)):
        if not isinstance(switch, bool):
            raise ArgumentError(f"dakota1890: `{name}` is true or false, without quotes, not {switch!r}.")
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


def _check_whole(name: str, value: object, *, least: int | None = None) -> None:
    if not _is_whole(value) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"dakota1890: `{name}` is a whole number{bound}, without quotes, not {value!r}.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    if families is None:
        return tuple(FAMILIES)
    if not isinstance(families, Sequence) or isinstance(families, str) or not families:
        raise ArgumentError(
            f"dakota1890: `families` is a list with at least one of {_NAMES}, not {families!r}. "
            "Write families=[\"numerals\"], or on a command line --arg 'families=numerals,'."
        )
    for family in families:
        if not isinstance(family, str) or family not in FAMILIES:
            close = difflib.get_close_matches(str(family), FAMILIES, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise ArgumentError(f"dakota1890: unknown family {family!r}; there are {_NAMES}.{meant}")
    return tuple(dict.fromkeys(families))


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
