"""Prompts and replies of the kept batches as features, from their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.transport.batches import Sample

Array = npt.NDArray[np.float64]

_WIDTH = 64
_MIXER = 0x9E3779B1


def token_features(ids: npt.NDArray[np.int32]) -> Array:
    """Return the shares of hashed tokens, the hashed first token, and the logarithm of the number of tokens.

    f64[2 * _WIDTH + 1]
    """
    hashed = (ids.astype(np.uint64) * np.uint64(_MIXER) % np.uint64(2**32)) % np.uint64(_WIDTH)
    counts = [np.bincount(each.astype(np.int64), minlength=_WIDTH) for each in (hashed, hashed[:1])]
    return np.r_[counts[0] / max(1, len(ids)), counts[1], np.log1p(len(ids))]


def prompt_tokens(sample: Sample) -> npt.NDArray[np.int32]:
    """Return the tokens before the first sampled one. The loss mask may be misplaced; versions are not."""
    places = np.flatnonzero(sample.versions >= 0)
    return sample.token_ids[: places[0]] if len(places) else sample.token_ids


def prompt_features(facts: DiagnosisFacts) -> tuple[list[int], Array]:
    """Return the step of each group G of the kept batches, and the features of its prompt, f64[G, D]."""
    steps, features = list[int](), list[Array]()
    for step, sample, _ in _first_segments(facts, every=False):
        steps.append(step)
        features.append(token_features(prompt_tokens(sample)))
    return steps, np.array(features)


def reply_features(facts: DiagnosisFacts) -> tuple[list[tuple[int, int, int]], Array]:
    """Return (step, group, number) of each of the R kept rollouts, and the features of replies, f64[R, D]."""
    names, features = list[tuple[int, int, int]](), list[Array]()
    for step, sample, (group, number) in _first_segments(facts, every=True):
        names.append((step, group, number))
        features.append(token_features(sample.token_ids[sample.loss_mask]))
    return names, np.array(features)


def _first_segments(facts: DiagnosisFacts, *, every: bool) -> Iterator[tuple[int, Sample, tuple[int, int]]]:
    """Yield (step, sample, (group, number)): the first segment of every rollout, or of one per group."""
    for batch in facts.batches:
        seen = set[tuple[int, ...]]()
        for sample, (group, number, _, _) in zip(batch.batch.samples, batch.origins, strict=False):
            name = (group, number) if every else (group,)
            if name not in seen:
                seen.add(name)
                yield batch.batch.step, sample, (group, number)
