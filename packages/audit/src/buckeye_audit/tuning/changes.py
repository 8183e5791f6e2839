"""How far a learning rate moves the policy: kept batches are trained on again, with another rate."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.trainer import ConstantSchedulerConfig, TrainedBatchesConfig, TrainerConfig
from buckeye.trainer.data.packing import pack_micro_batch, plan_bins
from buckeye.trainer.model.policy import Policy
from buckeye.trainer.rl import RLTrainer
from buckeye.trainer.setup import build_learner, trainer_process
from buckeye.transport.batches import Sample, read_trained
from buckeye.transport.checkpoint import list_checkpoints

_SAMPLES = 32
_ROW = 4096  # tokens
_LARGEST = 2.0  # nats


def policy_changes(run: Path, rate: float, most: int | None = None) -> list[float]:
    """Train on the batches that the run in `run` has kept, or on the first `most` of them, from where it
    began, with another learning rate: after each step by how much the policy has changed, in nats a token,
    as half the mean square of what its log-probs changed by. While that is small it is the KL divergence;
    large changes of single tokens are cut off, as a few of them would decide. Ends with a NaN where the model
    breaks. The run stays as it is."""
    steps = list(step_directories(run / "trained"))[:most]
    with trainer_from(run, steps[0], rate) as trainer:
        return _changes(trainer, run / "trained", steps)


@contextmanager
def trainer_from(run: Path, step: int, rate: float) -> Iterator[RLTrainer]:
    """A trainer that goes on from the newest checkpoint up to `step`, or from where the run began, with a
    constant learning rate. What it writes is deleted."""
    config = load_config(TrainerConfig, ["@", str(run / "configs" / "trainer.json")])
    checkpoints = [one for one in list_checkpoints(run / "checkpoints") if one.step <= step]
    resume = checkpoints[-1] if checkpoints and step > 0 else None
    with tempfile.TemporaryDirectory(prefix="buckeye-tune-") as scratch:
        config = _in_scratch(config, Path(scratch), rate)
        os.environ["BUCKEYE_THREADS"] = str(read_trained(run / "trained", step)[1].record["threads"])
        with trainer_process(config, "tune") as ranks:
            learner = build_learner(config, ranks, resume, max_steps=None)
            learner.progress = replace(learner.progress, step=step)
            trainer = RLTrainer(config, learner, StopFlag(), RunIdentity(run_id="tune", attempt=1))
            with trainer.output:
                yield trainer


def _in_scratch(config: TrainerConfig, scratch: Path, rate: float) -> TrainerConfig:
    return config.model_copy(
        update={
            "optim": config.optim.model_copy(update={"lr": rate}),
            "scheduler": ConstantSchedulerConfig(),
            "output_dir": scratch,
            "log": config.log.model_copy(update={"file": False, "level": "error"}),
            "trained": TrainedBatchesConfig(keep=0),
        }
    )


def _changes(trainer: RLTrainer, kept: Path, steps: Sequence[int]) -> list[float]:
    found, policy = list[float](), trainer.learner.policy
    for step in steps:
        batch = read_trained(kept, step)[0]
        samples = [sample for sample in batch.samples if sample.loss_mask.any()][:_SAMPLES]
        before = np.concatenate(masked_logprobs(policy, samples))
        trainer.train(batch)
        after = np.concatenate(masked_logprobs(policy, samples))
        moved = np.clip(after - before, -_LARGEST, _LARGEST)
        found.append(float(np.mean(np.square(moved))) / 2)
        if not math.isfinite(found[-1]):
            break
    return found


def masked_logprobs(
    policy: Policy, samples: Sequence[Sample], masks: Sequence[npt.NDArray[np.bool_]] | None = None
) -> list[npt.NDArray[np.float64]]:
    """For each sample f64[N]: the log-probs of its N tokens under a mask bool[T] which does not hold the
    first one; without `masks`, of what was sampled. Without the dropout of an adapter."""
    masks = [sample.loss_mask for sample in samples] if masks is None else masks
    ids, found = [sample.token_ids for sample in samples], [np.empty(0)] * len(samples)
    policy.module.eval()
    for chosen in plan_bins(ids, max([_ROW, *map(len, ids)])):
        at = chosen.indices
        row = pack_micro_batch([ids[i] for i in at], [masks[i] for i in at], policy.device)
        temperatures = torch.tensor([samples[i].temperature for i in at], device=policy.device)
        with torch.no_grad(), policy.computing():
            values = policy.token_logprobs(row, temperatures[row.sequences])[0].double().cpu().numpy()
        ends = np.cumsum([masks[i].sum() for i in at])
        for i, part in zip(at, np.split(values, ends[:-1]), strict=True):
            found[i] = part
    policy.module.train()
    return found
