"""How often, and after how long, what has died is started again. Pure: the times are given."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
_SAME_AT_EVERY_STEP = 3


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after `delay` seconds, for the `count`th time of at most `most`."""

    delay: float
    count: int
    most: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again, and why not."""

    why: str


@dataclass(slots=True)
class Budget:
    """The restarts of one process, or of those that live and die together: at most `most` within `window`
    seconds, after delays of `first_delay`, twice that, and so on; progress gives all of them back."""

    most: int
    window: float
    first_delay: float = FIRST_DELAY
    _ends: list[float] = field(default_factory=list)
    _last: tuple[str, int] | None = None
    _same: int = 0  # ends in a row with the same cause, each a step after the one before at most

    def after(self, now: float, *, cause: str | None, step: int) -> Again | GiveUp:
        """What follows on an end at the time `now`. `cause` is the error that the process named itself, None
        if it was ended by others; `step` is how far the run had come."""
        before, self._last = self._last, None if cause is None else (cause, step)
        if cause is not None and before == (cause, step):
            return GiveUp(
                f"It failed in the same way before, also at step {step}: starting it again is no use."
            )
        self._same = self._same + 1 if before in ((cause, step - 1), (cause, step)) else 1
        if self._same >= _SAME_AT_EVERY_STEP:
            return GiveUp(
                f"It failed in the same way at each of the last {self._same} steps: "
                "starting it again is no use."
            )
        self._ends = [end for end in self._ends if now - end < self.window]
        if len(self._ends) >= self.most:
            return GiveUp(f"{self._said()}.")
        self._ends.append(now)
        count = len(self._ends)
        return Again(min(_LONGEST_DELAY, self.first_delay * 2 ** (count - 1)), count, self.most)

    def refill(self) -> None:
        """The run has made progress since."""
        self._ends.clear()

    def _said(self) -> str:
        if not self.most:
            return "No restart is allowed (supervision.max_restarts = 0)"
        return (
            f"It had been started again {self.most} times within {self.window / 60:.0f} minutes "
            "(supervision.max_restarts)"
        )
