"""Number of tokens of a micro-batch: the configured maximum, halved after every out-of-memory error."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from buckeye.base.storage import read_json, write_file
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import FinalRunError, RunError
from buckeye.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

MICRO_BATCH_FILE = "micro_batch.json"
# torch has no exception class for these out-of-memory errors
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@dataclass(slots=True)
class MicroBatchSize:
    """Limit of tokens per micro-batch. `tokens` is the current limit, and `max_tokens` the configured limit.

    `retries` counts how often this run halved the limit. After each halving, `tokens` and `retries` are
    written to `path`. A restarted trainer reads them if its `conditions`, such as the device, are equal.
    """

    max_tokens: int
    tokens: int
    retries: int
    path: Path
    conditions: Mapping[str, Any]
    is_sharded: bool
    is_rank_zero: bool

    def capacity(self, longest: int) -> int:
        """Return the number of tokens that a micro-batch may have.

        This is at least `longest`, the length of the longest sample, but never more than `max_tokens`.
        """
        return max(self.tokens, min(longest, self.max_tokens))

    def halve(self, computed: int, longest: int, *, device: torch.device) -> None:
        """Halve the limit after a micro-batch of `computed` tokens ran out of memory.

        The caller can then retry the step. `longest` is the length of the longest sample. Raise
        `FinalRunError` if the limit is already as low as `longest`.

        Raise `RunError` if the model is sharded, because a rank cannot retry while the other ranks wait for
        it. The next attempt of the run starts with the halved limit.
        """
        if computed <= longest:
            raise FinalRunError(
                f"out of memory on {device} with {computed} tokens per micro-batch; the longest sample has "
                f"{longest}",
                code="BK-MEMORY",
                hint="set model.ac to recompute activations, lower seq_len, or use a device with more "
                "memory; `buckeye rl doctor` shows the memory use",
            )
        self.tokens = max(longest, computed // 2)
        self.retries += 1
        if self.is_sharded or self.is_rank_zero:
            self._write_limit()
        if self.is_sharded:
            raise RunError(
                f"out of memory on {device} with {computed} tokens per micro-batch: a step of a "
                f"sharded model cannot be retried; the next attempt uses {self.tokens} ({self.path})",
                code="BK-MEMORY",
                hint="lower seq_len, or set model.ac, to avoid the restart",
            )
        logger.warning(
            "Out of memory with %d tokens per micro-batch: retrying the step with %d, the limit from now on. "
            "To avoid the retry, lower seq_len of the trainer (sft: micro_batch_tokens), or set model.ac",
            computed,
            self.tokens,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def values(self) -> dict[str, float]:
        """Return the metrics for the record of a step."""
        return {"micro_batch_tokens": float(self.tokens), "oom_retries": float(self.retries)}

    def _write_limit(self) -> None:
        record = {"tokens": self.tokens, "retries": self.retries, "conditions": self.conditions}
        write_file(self.path, json.dumps(record, indent=1))


def load_micro_batch_size(config: TrainerConfig | SFTConfig, ranks: Ranks) -> MicroBatchSize:
    """Return the configured limit, or the limit that an earlier attempt of the run stored.

    All ranks must call this function. Each rank gets the lowest limit of all ranks.
    """
    path = config.output_dir / MICRO_BATCH_FILE
    cuda = ranks.device.type == "cuda"
    max_tokens = config.seq_len
    if isinstance(config, SFTConfig):
        max_tokens = max(max_tokens, config.micro_batch_tokens)
    conditions = {
        "seq_len": max_tokens,
        "ranks": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
        "optimizer": config.optim.type,
        "model": config.model.model_dump(mode="json"),
    }
    tokens, retries = _read_limit(path, conditions) or (max_tokens, 0)
    return MicroBatchSize(
        max_tokens=max_tokens,
        tokens=-ranks.max(-tokens),
        retries=retries,
        path=path,
        conditions=conditions,
        is_sharded=ranks.mesh is not None,
        is_rank_zero=ranks.is_rank_zero,
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if torch raised this error because GPU memory or main memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        part in str(error) for part in _OUT_OF_MEMORY_TEXTS
    )


def _read_limit(path: Path, conditions: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (tokens, retries) of an earlier attempt, or None if no file exists or its conditions differ."""
    try:
        record = read_json(path)
        if record["conditions"] != conditions:
            logger.info("Ignoring %s: written under other settings, or on another device", path)
            return None
        tokens, retries = int(record["tokens"]), int(record["retries"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("Ignoring %s, starting with the configured limit: it cannot be read: %s", path, error)
        return None
    logger.info(
        "Using %d tokens per micro-batch, from %s: an earlier attempt ran out of memory", tokens, path
    )
    return tokens, retries
