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
        raise ArgumentError(f'dakota1890: `hints` must be "rule" or "none", not {hints!r}')
    fraction = invented_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 <= fraction <= 1.0:
        raise ArgumentError(
            f"dakota1890: `invented_fraction` must be a number from 0 to 1, not {invented_fraction!r}"
        )
    for name, switch in (("invented", invented), ("shaping", shaping)):
        if not isinstance(switch, bool):
            raise ArgumentError(f"dakota1890: `{name}` must be true or false, without quotes, not {switch!r}")
    _check_integer("seed", seed)
    _check_integer("num_train", num_train, minimum=1)
    if num_eval is not None:
        _check_integer("num_eval", num_eval, minimum=1)
    options = TaskOptions(
        families=_checked_families(families),
        depths=_checked_depths(depths),
        hint=hints == "rule",
        invented_fraction=invented_fraction if invented else 0.0,
        seed=seed,
    )
    return Arguments(options=options, num_train=num_train, num_eval=num_eval, shaping=shaping)


def _check_integer(name: str, value: object, *, minimum: int | None = None) -> None:
    if not _is_integer(value) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise ArgumentError(f"dakota1890: `{name}` must be an integer{bound}, without quotes, not {value!r}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    if families is None:
        return tuple(FAMILIES)
    if not isinstance(families, Sequence) or isinstance(families, str) or not families:
        raise ArgumentError(
            f"dakota1890: `families` must be a list with at least one of {_NAMES}, not {families!r}",
            "write families=[\"numerals\"], or on a command line --arg 'families=numerals,'",
        )
    for family in families:
        if not isinstance(family, str) or family not in FAMILIES:
            close = difflib.get_close_matches(str(family), FAMILIES, 1)
            suggestion = f"did you mean {close[0]!r}? " if close else ""
            raise ArgumentError(f"dakota1890: unknown family {family!r}", f"{suggestion}Families: {_NAMES}")
    return tuple(dict.fromkeys(families))


def _checked_depths(depths: Sequence[int] | None) -> tuple[int, ...]:
    if depths is None:
        return DEPTHS
    is_list = isinstance(depths, Sequence) and not isinstance(depths, str) and len(depths) > 0
    if not is_list or not all(_is_integer(depth) and depth in DEPTHS for depth in depths):
        raise ArgumentError(
            f"dakota1890: `depths` must be a list of integers from {DEPTHS[0]} to {DEPTHS[-1]}, not "
            f"{depths!r}",
            "write depths=[1, 2], or on a command line --arg 'depths=[1, 2]'",
        )
    return tuple(sorted(set(depths)))
