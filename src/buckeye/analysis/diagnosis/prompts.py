"""Prompts and replies as features, from their tokens, and texts that a limit has cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.monitor.rollouts import RecordedRollout
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


def cut_texts(texts: Sequence[str]) -> tuple[int, int, list[str]] | None:
    """Return the count and the length of the longest texts, and their last words, if a limit has cut them.

    They are cut if they end with a letter, some within a word that others have whole or cut later.
    """
    longest = max(map(len, texts), default=0)
    words = [text.split()[-1] for text in texts if len(text) == longest and text[-1:].isalpha()]
    distinct = sorted(set(words))
    is_within_word = any(other.startswith(word) for word, other in pairwise(distinct))
    return (len(words), longest, distinct) if is_within_word else None


def prompt_tokens(sample: Sample) -> npt.NDArray[np.int32]:
    """Return the tokens before the first sampled one. The loss mask may be misplaced; versions are not."""
    places = np.flatnonzero(sample.versions >= 0)
    return sample.token_ids[: places[0]] if len(places) else sample.token_ids


def message_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message, and its tool calls without their ids."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return f"{message.get('content')}{json.dumps(calls)}" if calls else str(message.get("content"))


def continuations(rollout: RecordedRollout) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each observation after the first reply, with the contents of all messages before it."""
    contents, has_begun = [message_text(message) for message in rollout.messages], False
    for at, message in enumerate(rollout.messages):
        is_reply = message.get("role") == "assistant"
        if has_begun and not is_reply:
            yield tuple(contents[:at]), contents[at]
        has_begun |= is_reply
