"""Removal of invalid samples from batches.

The trainer does not train on invalid samples. It counts them, and writes them to `skipped/` for inspection.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.transport.batches import Batch, BatchDamageError, Sample, write_batch

logger = logging.getLogger(__name__)

_MAX_KEPT = 10

CAUSES = {
    "not_finite": "a log-prob or an advantage of a trained token is not finite",
    "vocabulary": "token ids outside the model's vocabulary: sampled from another model",
    "version": "policy versions newer than the step, or older than max_off_policy_steps allows",
    "temperature": "temperature 0: greedy tokens have no log-prob to train on; set "
    "orchestrator.sampling.temperature above 0",
    "first_token": "its first token is trained, but no token predicts it",
}
"""Reasons why a sample is invalid, by their names in metrics."""


def write_skipped_samples(root: Path, batch: Batch, identity: RunIdentity) -> None:
    """Write a batch of untrained samples to the directory `<root>/step_<N>`.

    If `root` already has ten batches, log a warning and write nothing. If writing fails, only log a warning,
    because training does not need these samples.
    """
    what = f"the untrained samples of step {batch.step}"
    if _is_full(root, what):
        return
    try:
        path = write_batch(root, batch, identity=identity)
    except (OSError, BatchDamageError) as error:  # of the disk, or of a sample that no rank has read
        logger.warning("Not keeping %s: %s", what, error)
        return
    logger.warning("Wrote the untrained samples of step %d to %s", batch.step, path)


def quarantine_batch(root: Path, damaged: Path) -> None:
    """Move a damaged batch to `<root>/damaged_<name>`. If `root` has ten batches, delete the batch."""
    target = root / f"damaged_{damaged.name}"
    if target.exists() or _is_full(root, f"the damaged batch {damaged}"):
        storage.remove_directory(damaged)
        return
    root.mkdir(parents=True, exist_ok=True)
    try:
        damaged.rename(target)
    except FileNotFoundError:  # another process deleted it
        return
    logger.warning("Moved the damaged batch %s to %s", damaged, target)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValidatedBatch:
    """Batch without invalid samples. `left_out` maps the index of each invalid sample to its cause."""

    usable: Batch
    left_out: Mapping[int, str]

    @property
    def has_no_usable_samples(self) -> bool:
        """True if the batch had samples, and all of them are invalid."""
        return bool(self.left_out) and not self.usable.samples

    def values(self) -> dict[str, float]:
        """Return the metrics of a step: the number of invalid samples, in total and by cause."""
        counts = {f"samples_left_out/{cause}": len(indices) for cause, indices in self._by_cause().items()}
        return {"samples_left_out": len(self.left_out), **counts}

    def describe(self) -> str:
        """Return the indices of the invalid samples and the causes as text."""
        return "; ".join(
            f"{_format_indices(indices)} ({cause}: {CAUSES[cause]})"
            for cause, indices in self._by_cause().items()
        )

    def _by_cause(self) -> dict[str, list[int]]:
        by_cause: dict[str, list[int]] = defaultdict(list)
        for index, cause in self.left_out.items():
            by_cause[cause].append(index)
        return by_cause


def remove_invalid_samples(batch: Batch, *, vocab_size: int, max_age: int) -> ValidatedBatch:
    """Return the batch without samples that have invalid values, or tokens older than `max_age` versions."""
    oldest = batch.step - max_age
    left_out = {
        index: cause
        for index, sample in enumerate(batch.samples)
        if (cause := _find_cause(sample, vocab_size=vocab_size, oldest=oldest, newest=batch.step)) is not None
    }
    usable = tuple(sample for index, sample in enumerate(batch.samples) if index not in left_out)
    return ValidatedBatch(usable=replace(batch, samples=usable), left_out=left_out)


def _is_full(root: Path, what: str) -> bool:
    is_full = len(list(root.glob("*step_*"))) >= _MAX_KEPT
    if is_full:
        logger.warning("Not keeping %s: %s already has %d", what, root, _MAX_KEPT)
    return is_full


def _find_cause(sample: Sample, *, vocab_size: int, oldest: int, newest: int) -> str | None:
    facts = sample.facts
    if facts.token_range[0] < 0 or facts.token_range[1] >= vocab_size:
        return "vocabulary"
    if not sample.temperature > 0:
        return "temperature"
    if facts.trains_first:
        return "first_token"
    if not facts.is_finite:
        return "not_finite"
    if facts.versions and (min(facts.versions) < max(0, oldest) or max(facts.versions) > newest):
        return "version"
    return None


def _format_indices(indices: list[int], limit: int = 8) -> str:
    listed = ", ".join(map(str, indices[:limit]))
    more = f" and {len(indices) - limit} more" if len(indices) > limit else ""
    return f"{'samples' if len(indices) > 1 else 'sample'} {listed}{more}"
