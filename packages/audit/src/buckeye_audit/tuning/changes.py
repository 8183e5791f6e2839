"""How far a learning rate moves the policy: kept batches are trained on again, with another rate."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.config.load import load_config
from buckeye.config.trainer import ConstantSchedulerConfig, TrainedBatchesConfig, TrainerConfig
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.policy import Policy
from buckeye.trainer.rl import RLTrainer
from buckeye.trainer.setup import build_learner, trainer_process
from buckeye.transport.batches import Sample, read_trained
from buckeye.transport.checkpoint import list_checkpoints

_SAMPLES = 32
_LARGEST = 2.0  # nats


def policy_changes(run: Path, rate: float, most: int | None = None) -> list[float]:
    """Train on the batches that the run in `run` has kept, or on the first `most` of them, from where it
    began, with another learning rate: after each step by how much the policy has changed, in nats a token,
    as half the mean square of what its log-probs changed by. While that is small it is the KL divergence;
    large changes of single tokens are cut off, as a few of them would decide. Ends with a NaN where the model
    breaks. The run stays as it is."""
    config = load_config(TrainerConfig, ["@", str(run / "configs" / "trainer.json")])
    kept = run / "trained"
    steps = sorted(int(path.name.partition("_")[2]) for path in kept.glob("step_*"))[:most]
    checkpoints = [one for one in list_checkpoints(run / "checkpoints") if one.step <= steps[0]]
    resume = checkpoints[-1] if checkpoints and steps[0] > 0 else None
    with tempfile.TemporaryDirectory(prefix="buckeye-tune-") as scratch:
        config = _in_scratch(config, Path(scratch), rate)
        os.environ["BUCKEYE_THREADS"] = str(read_trained(kept, steps[0])[1].record["threads"])
        with trainer_process(config, "tune") as ranks:
            learner = build_learner(config, ranks, resume, max_steps=None)
            learner.progress = replace(learner.progress, step=steps[0])
            trainer = RLTrainer(config, learner, StopFlag(), RunIdentity(run_id="tune", attempt=1))
            with trainer.output:
                return _changes(trainer, kept, steps)


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
        before = _logprobs(policy, samples)
        trainer.train(batch)
        after = _logprobs(policy, samples)
        moved = np.clip(after - before, -_LARGEST, _LARGEST)
        found.append(float(np.mean(np.square(moved))) / 2)
        if not math.isfinite(found[-1]):
            break
    return found


def _logprobs(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    """f64: the log-probs of the sampled tokens."""
    found = list[np.ndarray]()
    with torch.no_grad(), policy.computing():
        for sample in samples:
            row = pack_micro_batch([sample.token_ids], [sample.loss_mask], policy.device)
            temperatures = torch.full(
                (int(sample.loss_mask.sum()),), sample.temperature, device=policy.device
            )
            found.append(policy.token_logprobs(row, temperatures)[0].double().cpu().numpy())
    return np.concatenate(found)
