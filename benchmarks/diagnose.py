"""Measure the time and memory of a diagnosis of a long run.

The directory is synthetic, like that of a run that learns.

    python benchmarks/diagnose.py [--steps 1000] [--rollouts 128] [--kilobytes 3] [--kept 200] [--dir DIR]
    python benchmarks/diagnose.py --run RUN      cost of the checks during a run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from buckeye import runs
from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directories
from buckeye.monitor.rollouts import rollouts_files
from buckeye.transport.batches import Batch, Sample, TrainedBatch, archive_trained_batch

_GROUP = 8
_TOKENS = 250
_MEASURE = """
import resource, sys, time
begun = time.perf_counter()
from buckeye.analysis.diagnosis.diagnose import diagnose
done = diagnose(sys.argv[1])
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
seconds = time.perf_counter() - begun
print(f"{seconds:.1f} s ({time.process_time():.1f} s of a core), {memory:.0f} MiB at most, found: "
f"{[one.name for one in done.findings]} {done.not_looked_at} {done.failed_rules}")
"""


def make(run: Path, *, steps: int, rollouts: int, kilobytes: int, kept: int) -> None:
    """Write the files of a run of `steps` steps, with `kept` batches of tokens."""
    rng, words = random.Random(0), ["".join(random.Random(n).choices("etaoin", k=5)) for n in range(500)]
    (run / "rollouts").mkdir(parents=True)
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            share = 0.2 + 0.6 * step / steps
            lines, rewards = [], []
            for number in range(rollouts):
                group, reward = step * rollouts // _GROUP + number // _GROUP, float(rng.random() < share)
                rewards.append(reward)
                said = " ".join(rng.choices(words, k=kilobytes * 60))
                prompt = {"role": "user", "content": f"task {group % 5000}: " + " ".join(words[:20])}
                lines.append(
                    json.dumps(
                        {
                            "group": group,
                            "env": "made",
                            "task_id": f"train-{group % 5000}",
                            "reward": reward,
                            "shaped_reward": reward,
                            "advantages": [_given(number, reward)],
                            "components": {"exact": reward},
                            "stop_reason": "done",
                            "seconds": 3.0,
                            "completion_tokens": _TOKENS,
                            "oldest_version": step,
                            "turns": 1,
                            "text": [prompt["content"] + said],
                            "messages": [prompt, {"role": "assistant", "content": said}],
                        }
                    )
                )
            (run / "rollouts" / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
            if step >= steps - kept:
                keep(run, step, rewards)
            figures = {f"more/{number}": rng.random() for number in range(60)}
            for process, known in (
                ("orchestrator", {"reward/mean": share, "reward/std": 0.4, "batch/with_spread": 0.9}),
                ("trainer", {"trained_tokens": 30000, "entropy": 1.0, "loss": 0.0, "mismatch_kl": 1e-4}),
            ):
                record = {
                    "time": 1.7e9 + step,
                    "attempt": 1,
                    "process": process,
                    "step": step,
                    **known,
                    **figures,
                }
                metrics.write(json.dumps(record) + "\n")


def _given(number: int, reward: float) -> float:
    """Return a synthetic advantage, above 0 for a rewarded rollout."""
    return reward - 0.5 + 0.01 * (number % 3)


def keep(run: Path, step: int, rewards: list[float]) -> None:
    """Write a trained batch: 40 prompt tokens per sample, and the rest sampled."""
    rng = np.random.default_rng(step)
    mask = np.arange(40 + _TOKENS) >= 40
    samples, logprobs = [], []
    given = [_given(number, reward) for number, reward in enumerate(rewards)]
    for number in range(len(rewards)):
        found = -rng.exponential(1.0, len(mask)).astype(np.float32)
        samples.append(
            Sample(
                token_ids=rng.integers(0, 150_000, len(mask), dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, found, np.float32(0)),
                versions=np.where(mask, np.int32(step), np.int32(-1)),
                advantages=np.where(mask, np.float32(given[number]), np.float32(0)),
                temperature=1.0,
            )
        )
        logprobs.append(found[mask] + rng.normal(0, 1e-3, int(mask.sum())).astype(np.float32))
    batch = Batch(step=step, samples=tuple(samples), orchestrator_state={})
    trained = TrainedBatch(
        samples=np.arange(len(rewards), dtype=np.int32),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        record={"values": {}},
    )
    identity = RunIdentity(run_id="made", attempt=1)
    archive_trained_batch(run / "batches", run / "trained", batch, trained, identity=identity)


@contextmanager
def made_run(description: str, *, kept: int) -> Iterator[Path]:
    """Yield the directory that the arguments select; create it if it does not exist."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in (("steps", 1000), ("rollouts", 128), ("kilobytes", 3), ("kept", kept)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", type=Path, default=None, help="made there if it is not, and left")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = given.dir or Path(folder) / "run"
        if not run.exists():
            begun = time.perf_counter()
            make(run, steps=given.steps, rollouts=given.rollouts, kilobytes=given.kilobytes, kept=given.kept)
            print(f"made in {time.perf_counter() - begun:.0f} s")
        yield run


def looks(run: Path) -> None:
    """Measure the checks of `rl` on all records after 8, 16, 32 ... steps, each from scratch.

    Each check reads a copy of the records at that step. Checks run at the lowest priority, so a run loses at
    most this time.
    """
    steps = runs.open(run).steps
    times = [float(step.trained["time"]) for step in steps if step.trained is not None]
    spent, number = 0.0, 8
    while number < len(times):
        with tempfile.TemporaryDirectory() as folder:
            copy = as_it_was(run, Path(folder) / "run", number)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            argv = [sys.executable, "-m", "buckeye", "rl", "diagnose", str(copy), "--json"]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            said = subprocess.run(argv, capture_output=True, check=False, env=env).stdout  # 1 if it finds any
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        told = json.loads(said)
        if told["not_looked_at"] or told["failed_rules"]:
            raise SystemExit(f"After {number} steps not all was looked at: {told}")
        took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        spent, number = spent + took, 2 * number
        print(f"after {number // 2} steps: {took:.1f} s of a core", flush=True)
    whole = times[-1] - times[0]
    print(f"{spent:.1f} s of a core, {spent / whole:.1%} of the {whole:.0f} s of {len(times)} steps")


def as_it_was(run: Path, copy: Path, until: int) -> Path:
    """Copy the records that existed after a step."""
    kept = step_directories(run / "trained").items()
    for number, path in (*rollouts_files(run / "rollouts"), *kept):
        if number <= until:
            folder = copy / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path.absolute())
    shutil.copytree(run / "configs", copy / "configs")
    shutil.copy(run / "run.json", copy)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(one for one in lines if json.loads(one)["step"] <= until))
    return copy


def main() -> None:
    """Print time and memory of a first and a second diagnosis, or of the checks during a run."""
    if sys.argv[1:2] == ["--run"]:
        looks(Path(sys.argv[2]))
        return
    with made_run(str(__doc__), kept=200) as run:
        for what in ("without an index", "with the index"):
            if what == "without an index":
                (run / "rollouts" / "index.sqlite").unlink(missing_ok=True)
            done = subprocess.run(
                [sys.executable, "-c", _MEASURE, run], capture_output=True, text=True, check=True
            )
            print(f"{what}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
