"""Assign each group an environment and a task: a pure function of the group's number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.config.environments import EnvMixConfig

EVENLY = EnvMixConfig()
"""Environments alternate by their ratios, each with epochs of its own."""


@dataclass(frozen=True, slots=True)
class Deal:
    """The environment (its position), how often its tasks were begun before, and which one of them."""

    environment: int
    epoch: int
    nth: int


class Mix:
    """Deals groups to environments whose numbers of tasks are `sizes` (None: of a curriculum, without end).

    * interleave: by the shares, with the largest deficit first, so any stretch of groups is as close to the
      shares as whole numbers allow; or with a seed, drawn by the shares.
    * concatenate: all tasks of the first, then all of the second, and so on.

    With `all_exhausted` each environment starts its tasks again when they are used up, with `first_exhausted`
    all do as soon as one is.
    """

    def __init__(self, shares: Sequence[float], sizes: Sequence[int | None], mix: EnvMixConfig) -> None:
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._sizes = list(sizes)
        self._mix = mix
        self._random = None if mix.seed is None else random.Random(f"mix/{mix.seed}")  # noqa: S311  chance that keeps no secret
        self._dealt: list[Deal] = []
        self._counts = [0] * len(sizes)  # groups of each environment
        self._epochs = [0] * len(sizes)
        self._used = [0] * len(sizes)  # tasks of its epoch

    def __getitem__(self, index: int) -> Deal:
        """The deal of group `index` (from 0)."""
        while len(self._dealt) <= index:
            self._deal_next()
        return self._dealt[index]

    def _deal_next(self) -> None:
        chosen = self._choose()
        self._dealt.append(Deal(chosen, self._epochs[chosen], self._used[chosen]))
        self._counts[chosen] += 1
        self._used[chosen] += 1
        if self._used[chosen] == self._sizes[chosen]:
            self._exhausted(chosen)

    def _choose(self) -> int:
        if self._mix.strategy == "concatenate":
            return self._epochs.index(min(self._epochs))
        if self._random is not None:
            return self._random.choices(range(len(self._shares)), self._shares)[0]
        dealt = len(self._dealt) + 1
        deficits = [share * dealt - n for share, n in zip(self._shares, self._counts, strict=True)]
        return deficits.index(max(deficits))

    def _exhausted(self, chosen: int) -> None:
        together = self._mix.stopping_strategy == "first_exhausted" and self._mix.strategy == "interleave"
        for i in range(len(self._sizes)) if together else [chosen]:
            if self._sizes[i] is not None:
                self._epochs[i] += 1
                self._used[i] = 0
