"""Which cell of an environment is played next: the ones that are neither solved nor out of reach.

A cell is a named sequence of train tasks that are about equally hard, such as "conjugate/2". What comes
before the last slash is its family. An environment that has cells offers them as
`curriculum() -> Mapping[str, Sequence[Task]]`.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from buckeye.envs.base import Environment, Task
from buckeye.errors import UsageError
from buckeye.orchestrator.environments import NamedEnvironment

WINDOW = 8
"""How many of a cell's last groups make its solve rate. A longer memory is steadier, but a cell that is
rarely dealt needs longer to come back."""

BAND = (0.2, 0.8)
"""Solve rates at which a cell has full weight: there most groups have rewards that differ."""

WEIGHT_OUTSIDE = 0.1
"""The weight of a cell outside of the band; inside it is 1. Never 0, or the cell could not come back."""

PRIOR_ROLLOUTS = 4
"""A cell is weighed as if that many more rollouts had been played and half of them solved. So a cell that was
never played is tried, and one unlucky group of few rollouts does not take it out."""

_LOG_EVERY = 64  # groups

log = logging.getLogger(__name__)


class Deal(NamedTuple):
    """The task of a group: the `nth` (from 0) that was dealt from a cell."""

    cell: str
    nth: int


@dataclass(slots=True)
class _Cell:
    tasks: Sequence[Task]
    dealt: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(solved, scored) rollouts of its last groups."""

    @property
    def solved(self) -> int:
        return sum(solved for solved, _ in self.recent)

    @property
    def scored(self) -> int:
        return sum(scored for _, scored in self.recent)

    @property
    def weight(self) -> float:
        rate = (self.solved + PRIOR_ROLLOUTS / 2) / (self.scored + PRIOR_ROLLOUTS)
        return 1.0 if BAND[0] <= rate <= BAND[1] else WEIGHT_OUTSIDE


class Curriculum:
    """Deals the groups of one environment by cell.

    What a group is dealt depends on (seed, group index, statistics at that time). It is kept until the group
    is settled, so a group that is played again gets the same task. All of it is in `state()`.
    """

    def __init__(self, env_name: str, cells: Mapping[str, Sequence[Task]], *, seed: int) -> None:
        for name, tasks in cells.items():
            if not len(tasks):
                raise UsageError(
                    f"environment {env_name} has no tasks in the cell {name!r} of its curriculum"
                )
        self._env_name = env_name
        self._seed = f"{seed}/{env_name}"
        self._cells = {name: _Cell(tasks) for name, tasks in cells.items()}
        self._open: dict[int, Deal] = {}
        self._settled = 0

    def deal(self, index: int) -> Task:
        """The task of group `index` of the run; the same one until the group is settled."""
        if index not in self._open:
            shares = self.shares()
            name = random.Random(f"{self._seed}/{index}").choices(list(shares), list(shares.values()))[0]  # noqa: S311  chance that keeps no secret
            self._open[index] = Deal(name, self._cells[name].dealt)
            self._cells[name].dealt += 1
        deal = self._open[index]
        tasks = self._cells[deal.cell].tasks
        epoch, position = divmod(deal.nth, len(tasks))
        return tasks[_shuffled(position, len(tasks), f"{self._seed}/{deal.cell}/{epoch}")]

    def settle(self, index: int, rewards: Sequence[float]) -> None:
        """Group `index` is over. A reward of at least 1 counts as solved; without rewards nothing is learned
        about its cell."""
        deal = self._open.pop(index)
        if rewards:
            self._cells[deal.cell].recent.append((sum(r >= 1.0 for r in rewards), len(rewards)))
        self._settled += 1
        if self._settled % _LOG_EVERY == 0:
            log.debug("Curriculum of %s: %s", self._env_name, self._summary())

    def shares(self) -> dict[str, float]:
        """Cell -> its share of the next groups; they sum to 1.

        A family weighs as much as its heaviest cell, and its cells share that in proportion to their weights.
        So a family of four cells is dealt no more often than a family of one.
        """
        weights = {name: cell.weight for name, cell in self._cells.items()}
        families: dict[str, list[float]] = {}
        for name, weight in weights.items():
            families.setdefault(family_of(name), []).append(weight)
        total = sum(max(members) for members in families.values())
        shares = {}
        for name, weight in weights.items():
            members = families[family_of(name)]
            shares[name] = max(members) / total * weight / sum(members)
        return shares

    def metrics(self) -> dict[str, float]:
        """`curriculum/<env>/<cell>/weight`, the cell's share of the next groups, and `.../solve_rate` over
        its last groups if any were scored."""
        values = {}
        for name, share in self.shares().items():
            cell, key = self._cells[name], f"curriculum/{self._env_name}/{name}"
            values[f"{key}/weight"] = share
            if cell.scored:
                values[f"{key}/solve_rate"] = cell.solved / cell.scored
        return values

    def _summary(self) -> str:
        return ", ".join(
            f"{name} {share:.1%} of groups, {cell.solved}/{cell.scored} solved"
            for (name, share), cell in zip(self.shares().items(), self._cells.values(), strict=True)
        )

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {
            "open": [[index, *deal] for index, deal in sorted(self._open.items())],
            "cells": {
                name: {"dealt": cell.dealt, "recent": [list(counts) for counts in cell.recent]}
                for name, cell in self._cells.items()
            },
        }

    def restore(self, state: Mapping[str, Any], pending: Collection[int]) -> None:
        """Go on from `state()`; of the groups it has open only the `pending` ones. Cells that the environment
        no longer has are forgotten, and their groups dealt again."""
        for name, saved in state["cells"].items():
            if name in self._cells:
                cell = self._cells[name]
                cell.dealt = saved["dealt"]
                cell.recent.extend((solved, scored) for solved, scored in saved["recent"])
        self._open = {
            index: Deal(name, nth)
            for index, name, nth in state["open"]
            if index in pending and name in self._cells
        }


def family_of(cell: str) -> str:
    """What comes before the last slash; a cell without one is a family of its own."""
    return cell.rpartition("/")[0] or cell


def cells_of(environment: Environment) -> Mapping[str, Sequence[Task]]:
    """The cells an environment offers; empty if it has no curriculum."""
    offer = getattr(environment, "curriculum", None)
    return offer() if offer is not None else {}


def load_curricula(
    environments: Sequence[NamedEnvironment], seed: int, state: Mapping[str, Any]
) -> dict[str, Curriculum]:
    """Environment name -> its curriculum, for those that have one, restored from the orchestrator's state.

    Raises UsageError if none has one.
    """
    cells = {env.name: cells_of(env.environment) for env in environments}
    curricula = {name: Curriculum(name, offered, seed=seed) for name, offered in cells.items() if offered}
    if not curricula:
        raise UsageError(
            f"orchestrator.curriculum is true, but no environment has a curriculum: {', '.join(cells)} "
            f"{'has' if len(cells) == 1 else 'have'} none. Leave it out, or train on an environment that "
            "offers cells of tasks as `curriculum()`"
        )
    saved, pending = state.get("curriculum", {}), set(state.get("pending", []))
    for name, curriculum in curricula.items():
        if name in saved:
            curriculum.restore(saved[name], pending)
    return curricula


def _shuffled(position: int, size: int, seed: str) -> int:
    """What is at `position` in a seeded order of range(size), without making the order: cells may be endless.

    A Feistel network of four rounds permutes the next power of four; what falls outside of the range is
    permuted again until it is inside (cycle walking, Black and Rogaway 2002).
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = position >> bits, position & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{seed}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        position = left << bits | right
        if position < size:
            return position
