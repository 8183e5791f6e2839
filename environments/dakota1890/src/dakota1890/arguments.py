"""The arguments of `load_environment`, the same behind every face."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from dakota1890.errors import ArgumentError
from dakota1890.families import FAMILIES
from dakota1890.tasks import DEPTHS, TaskOptions

NUM_TRAIN = 100_000


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
    """The arguments as one value. Raises ArgumentError for one outside what `load_environment` says."""
    if hints not in ("rule", "none"):
        raise ArgumentError(f'dakota1890: `hints` is "rule" or "none", not {hints!r}.')
    if not 0.0 <= invented_fraction <= 1.0:
        raise ArgumentError(f"dakota1890: `invented_fraction` is between 0 and 1, not {invented_fraction!r}.")
    if num_train < 1 or (num_eval is not None and num_eval < 1):
        raise ArgumentError("dakota1890: `num_train` and `num_eval` are at least 1.")
    options = TaskOptions(
        families=_checked_families(families),
        depths=_checked_depths(depths),
        hint=hints == "rule",
        invented_fraction=invented_fraction if invented else 0.0,
        seed=seed,
    )
    return Arguments(options=options, num_train=num_train, num_eval=num_eval, shaping=shaping)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    if families is None:
        return tuple(FAMILIES)
    names = ", ".join(FAMILIES)
    if isinstance(families, str) or not families:
        raise ArgumentError(f"dakota1890: `families` is a list with at least one of {names}.")
    for family in families:
        if family not in FAMILIES:
            close = difflib.get_close_matches(str(family), FAMILIES, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise ArgumentError(f"dakota1890: unknown family {family!r}; there are {names}.{meant}")
    return tuple(dict.fromkeys(families))


def _checked_depths(depths: Sequence[int] | None) -> tuple[int, ...]:
    if depths is None:
        return DEPTHS
    if isinstance(depths, (str, int)) or not depths or not set(depths) <= set(DEPTHS):
        raise ArgumentError(f"dakota1890: `depths` is a list of {DEPTHS}, not {depths!r}.")
    return tuple(sorted(set(depths)))
