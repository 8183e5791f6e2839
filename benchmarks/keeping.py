"""Measure what keeping a step's batch for `rl replay` costs (`trainer.trained.record_order`).

    python benchmarks/keeping.py [--hidden 256] [--layers 4] [--samples 64] [--length 256] [--steps 30]

Two trainers of the same model train on the same batches in turns: one keeps all, the other none. Prints the
median seconds of a step of each, and the median of the ratio within a pair.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.config.load import load_config
from buckeye.config.trainer import TrainerConfig
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.rl import RLTrainer
from buckeye.trainer.setup import build_learner, trainer_process
from buckeye.transport.batches import Batch, Sample, write_batch

VOCABULARY = 1024
ME = RunIdentity(run_id="keeping", attempt=1)


def main() -> None:
    """Train in turns and print the times."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root, size = Path(folder), TinySize(vocab_size=VOCABULARY, layers=args.layers, hidden=args.hidden)
        make_tiny_model(root / "model", texts=["say 1 2 3"] * 20, size=size, seed=0)
        kinds = {"kept": ("--trained.record-order", "true"), "not kept": ("--trained.keep", "0")}
        configs = {
            name: _config(root / name, root / "model", args.length, words) for name, words in kinds.items()
        }
        ranks = stack.enter_context(trainer_process(configs["kept"], "keeping"))
        trainers = {name: stack.enter_context(_trainer(config, ranks)) for name, config in configs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for step in range(args.steps):
            batch = _batch(np.random.default_rng(step), step, args.samples, args.length)
            for name in sorted(trainers, reverse=step % 2 == 0):
                write_batch(trainers[name].config.output_dir / "batches", batch, identity=ME)
                began = time.perf_counter()
                trainers[name].train(batch)
                seconds[name].append(time.perf_counter() - began)
    ratios = [kept / not_kept for kept, not_kept in zip(*seconds.values(), strict=True)]
    for name, found in seconds.items():
        print(f"{name:9} {statistics.median(found[1:]):.4f} s a step (median of {args.steps - 1})")
    low, middle, high = statistics.quantiles(ratios[1:], n=4)
    print(f"keeping costs {middle - 1:+.1%} of a step (quartiles {low - 1:+.1%} to {high - 1:+.1%})")


@contextmanager
def _trainer(config: TrainerConfig, ranks: Ranks) -> Iterator[RLTrainer]:
    trainer = RLTrainer(config, build_learner(config, ranks, None, max_steps=None), StopFlag(), ME)
    with trainer.output:
        yield trainer


def _config(folder: Path, model: Path, length: int, words: tuple[str, ...]) -> TrainerConfig:
    given = ("--model.name", str(model), "--output-dir", str(folder), "--seq-len", str(length))
    return load_config(TrainerConfig, [*given, "--model.device", "cpu", "--log.level", "error", *words])


def _batch(rng: np.random.Generator, step: int, samples: int, length: int) -> Batch:
    """Return a batch whose samples are half prompt, half reply."""
    mask = np.arange(length) >= length // 2
    made = [
        Sample(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -7.0, 0.0).astype(np.float32),
            versions=np.where(mask, step, -1).astype(np.int32),
            advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
            temperature=1.0,
        )
        for _ in range(samples)
    ]
    return Batch(step=step, samples=tuple(made), orchestrator_state={})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("hidden", 256), ("layers", 4), ("samples", 64), ("length", 256), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
