"""Train on recorded batches with another learning rate, and measure the policy changes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from buckeye.analysis.replay.replay_step import trainer_in
from buckeye.analysis.replay.start import ReplayStart
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.trainer import ConstantSchedulerConfig, TrainerConfig
from buckeye.trainer.data.packing import pack_micro_batch, plan_bins
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.rl import RLTrainer
from buckeye.transport.batches import Sample, read_trained_batch
from buckeye.transport.checkpoint import list_checkpoints

_ROW = 4096  # tokens
_MAX_SAMPLES = 32
_MAX_CHANGE = 2.0  # nats


@contextmanager
def trainer_from(run: Path, step: int, rate: float) -> Iterator[RLTrainer]:
    """Yield a trainer from the newest checkpoint up to `step`, or from the start of the run.

    The trainer has the constant learning rate `rate`. Its files are deleted after the block.
    """
    config = load_config(TrainerConfig, ["@", str(run / "configs" / "trainer.json")])
    optim = config.optim.model_copy(update={"lr": rate})
    config = config.model_copy(update={"optim": optim, "scheduler": ConstantSchedulerConfig()})
    checkpoints = [one for one in list_checkpoints(run / "checkpoints") if one.step <= step]
    start = ReplayStart(step=step, path=Path(config.model.name))
    if checkpoints and step > 0:
        start = ReplayStart(step=step, path=checkpoints[-1].path, checkpoint=checkpoints[-1])
    os.environ["BUCKEYE_THREADS"] = str(read_trained_batch(run / "trained", step)[1].record["threads"])
    with (
        tempfile.TemporaryDirectory(prefix="buckeye-retrain-") as scratch,
        trainer_in(Path(scratch), config, start) as trainer,
    ):
        yield trainer


def masked_logprobs(
    policy: PolicyNetwork, samples: Sequence[Sample], masks: Sequence[npt.NDArray[np.bool_]] | None = None
) -> list[npt.NDArray[np.float64]]:
    """Return, for each sample, the log-probs f64[N] of the N tokens that its mask bool[T] selects.

    A mask must not select the first token. The default masks select the sampled tokens. Dropout is disabled.
    """
    masks = [sample.loss_mask for sample in samples] if masks is None else masks
    ids, found = [sample.token_ids for sample in samples], [np.empty(0)] * len(samples)
    policy.eval()
    for chosen in plan_bins(ids, max([_ROW, *map(len, ids)]), padded=policy.padded):
        at = chosen.indices
        row = pack_micro_batch([ids[i] for i in at], [masks[i] for i in at], policy.device)
        temperatures = torch.tensor([samples[i].temperature for i in at], device=policy.device)
        with torch.no_grad(), policy.cast_weights():
            values = policy(row, temperatures[row.sequences])[0].double().cpu().numpy()
        ends = np.cumsum([masks[i].sum() for i in at])
        for i, part in zip(at, np.split(values, ends[:-1]), strict=True):
            found[i] = part
    policy.train()
    return found


def measure_policy_changes(run: Path, rate: float, max_batches: int | None = None) -> list[float]:
    """Train on the recorded batches of `run` with another learning rate, and return the policy changes.

    Training starts from the newest checkpoint at or before the first recorded batch, else from the initial
    model. It uses all recorded batches, or the first `max_batches`.

    A policy change is half the mean squared change of the log-probs in a step, in nats per token. For small
    values, it approximates the KL divergence. Changes of single tokens are clipped, because a few large ones
    could dominate. The list ends with NaN if the weights become NaN. The run itself is not changed.
    """
    steps, found = list(step_directories(run / "trained"))[:max_batches], list[float]()
    with trainer_from(run, steps[0], rate) as trainer:
        policy = trainer.learner.policy
        for step in steps:
            batch = read_trained_batch(run / "trained", step)[0]
            samples = [sample for sample in batch.samples if sample.loss_mask.any()][:_MAX_SAMPLES]
            before = np.concatenate(masked_logprobs(policy, samples))
            trainer.train(batch)
            after = np.concatenate(masked_logprobs(policy, samples))
            moved = np.clip(after - before, -_MAX_CHANGE, _MAX_CHANGE)
            found.append(float(np.mean(np.square(moved))) / 2)
            if not math.isfinite(found[-1]):
                break
    return found
