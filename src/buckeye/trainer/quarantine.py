"""Quarantine of invalid samples: never trained on, never fatal, always counted, and stored in `skipped/` for
inspection.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.transport.batches import Batch, Sample, write_batch

logger = logging.getLogger(__name__)

_MOST = 10


def write_skipped_samples(root: Path, batch: Batch, identity: RunIdentity) -> None:
    """Write the left-out samples of a step to `<root>/step_<N>`, as a batch. Only the first few steps are
    kept.
    """
    if _full(root, f"What was left out of step {batch.step}"):
        return
    path = write_batch(root, batch, identity=identity)
    logger.warning("What was left out of step %d is kept in %s.", batch.step, path)


def quarantine_batch(root: Path, damaged: Path) -> None:
    """Move an unreadable batch to `<root>/damaged_<name>`, or delete it if enough are kept."""
    target = root / f"damaged_{damaged.name}"
    if target.exists() or _full(root, f"The damaged {damaged}"):
        storage.remove_directory(damaged)
        return
    root.mkdir(parents=True, exist_ok=True)
    try:
        damaged.rename(target)
    except FileNotFoundError:  # another process deleted it
        return
    logger.warning("%s is kept as %s.", damaged, target)


def _full(root: Path, what: str) -> bool:
    full = len(list(root.glob("*step_*"))) >= _MOST
    if full:
        logger.warning("%s is not kept: %s holds %d.", what, root, _MOST)
    return full


CAUSES = {
    "not_finite": "a log-prob or an advantage of a trained token is no finite number",
    "vocabulary": "token ids outside the model's vocabulary: it was sampled from another model",
    "version": "written by a policy version that this step cannot have, or that is older than "
    "max_off_policy_steps allows",
    "temperature": "temperature 0: greedy tokens have no log-probability to learn from; set "
    "orchestrator.sampling.temperature above 0",
    "first_token": "its first token is to be trained on, and nothing comes before it",
}
"""Reasons for leaving a sample out, by the name under which they are counted."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValidatedBatch:
    """Batch without the invalid samples. `left_out` maps their index in the batch to the cause."""

    usable: Batch
    left_out: Mapping[int, str]

    @property
    def has_no_usable_samples(self) -> bool:
        """True if the batch had samples and none is usable."""
        return bool(self.left_out) and not self.usable.samples

    def values(self) -> dict[str, float]:
        """Return the values for a step's record: the number of left-out samples, in total and by cause."""
        counts = {f"samples_left_out/{cause}": len(found) for cause, found in self._by_cause().items()}
        return {"samples_left_out": len(self.left_out), **counts}

    def describe(self) -> str:
        """Return the left-out samples and causes as text."""
        parts = [f"{_numbers(found)} ({cause}: {CAUSES[cause]})" for cause, found in self._by_cause().items()]
        return "; ".join(parts)

    def _by_cause(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for index, cause in self.left_out.items():
            found[cause].append(index)
        return found


def remove_invalid_samples(batch: Batch, *, vocab_size: int, max_age: int) -> ValidatedBatch:
    """Remove the samples that cannot be trained on from a batch."""
    oldest = batch.step - max_age
    found = {
        index: cause
        for index, sample in enumerate(batch.samples)
        if (cause := _cause(sample, vocab_size=vocab_size, oldest=oldest, newest=batch.step)) is not None
    }
    usable = tuple(sample for index, sample in enumerate(batch.samples) if index not in found)
    return ValidatedBatch(usable=replace(batch, samples=usable), left_out=found)


def _cause(sample: Sample, *, vocab_size: int, oldest: int, newest: int) -> str | None:
    trained = sample.loss_mask
    if sample.token_ids.min() < 0 or sample.token_ids.max() >= vocab_size:
        return "vocabulary"
    if not sample.temperature > 0:
        return "temperature"
    if trained[0]:
        return "first_token"
    if not (np.isfinite(sample.logprobs[trained]).all() and np.isfinite(sample.advantages[trained]).all()):
        return "not_finite"
    versions = sample.versions[trained]
    if len(versions) and (versions.min() < max(0, oldest) or versions.max() > newest):
        return "version"
    return None


def _numbers(indices: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, indices[:most]))
    more = f" and {len(indices) - most} more" if len(indices) > most else ""
    return f"{'samples' if len(indices) > 1 else 'sample'} {shown}{more}"
