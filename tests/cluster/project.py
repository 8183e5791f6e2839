"""A small run for one host or two, and its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from buckeye.transport.weights import read_weights_manifest

LIMIT = 1200


@dataclass(frozen=True)
class Project:
    """Project whose `folder` has the environment and the model."""

    folder: Path
    steps: int

    def write(self, name: str, *, trainers: list[int], cluster: str = "") -> Path:
        """Write the file of a run and return its output directory."""
        (self.folder / f"{name}.toml").write_text(
            f'output_dir = "outputs/{name}"\nmax_steps = {self.steps}\nmax_async_level = 0\n'
            f"inference_gpu_ids = [0]\ntrainer_gpu_ids = {trainers}\n"
            f'[model]\nname = "{self.folder}/tiny"\n'
            "[orchestrator]\nbatch_size = 16\nrollouts_per_example = 4\nseq_len = 64\n"
            '[orchestrator.sampling]\nmax_tokens = 6\n[[orchestrator.env]]\nid = "letters.py"\n'
            '[trainer.optim]\nlr = 1e-2\n[trainer.model]\ndevice = "cpu"\n[trainer.ckpt]\ninterval = 1\n'
            f"[inference]\n{cluster}"
        )
        return self.folder / "outputs" / name

    @property
    def env(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PRIME_", "BUCKEYE_", "HF_", "OMP_"))
        }
        return {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "HF_HUB_OFFLINE": "1"}

    def argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "buckeye", *map(str, words)]

    def run(self, *words: object, core: int | None = None) -> subprocess.CompletedProcess[str]:
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        return subprocess.run(
            [*pinned, *self.argv(*words)],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )


def make_project(folder: Path, *, steps: int) -> Project:
    from buckeye.trainer.model.tiny import TinySize, make_tiny_model  # takes seconds
    from tests.run.conftest import ENVIRONMENT

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "letters.py").write_text(ENVIRONMENT)
    texts = ["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(folder / "tiny", texts=texts, size=size, seed=0)
    return Project(folder, steps)


def records(output: Path, process: str) -> dict[int, dict[str, object]]:
    """Return the newest record of each step."""
    path = output / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: record for record in found if record["process"] == process}


@dataclass(frozen=True)
class Result:
    """Values that are equal for equal runs: losses and rewards by step, and the last weights' checksum."""

    losses: list[object]
    rewards: list[object]
    checksum: str


def result(output: Path, steps: int) -> Result:
    trained, collected = records(output, "trainer"), records(output, "orchestrator")
    assert sorted(trained) == list(range(steps))
    return Result(
        losses=[trained[step]["loss"] for step in range(steps)],
        rewards=[collected[step]["reward/mean"] for step in range(steps)],
        checksum=read_weights_manifest(output / "weights" / f"step_{steps}").checksum,
    )


def attempts(output: Path) -> list[dict[str, object]]:
    """Return the attempts of the run recorded in `run.json`."""
    found = json.loads((output / "run.json").read_text())
    return list(found["attempts"])
