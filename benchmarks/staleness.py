"""Measure reward against wall clock with stale rollouts, with and without correction, on the demonstration.

    python benchmarks/staleness.py [--levels 0 1 2 4 8] [--losses ...] [--steps 60] [--folder DIRECTORY]

Every run starts from the demonstration's warm-started model and takes the same number of steps with its
settings; only `max_async_level` and the loss differ. The sampler is the faster side here, so rollouts are as
stale as allowed. Losses:

    uncorrected  -A log pi: the sampler's probabilities are ignored
    ppo          clipped ratio to the sampler
    default      the masked ratio, Buckeye's default
    decoupled    decoupled PPO with truncated weights

Finished runs are kept in the folder and not repeated. Prints Markdown; the format is that of AReaL's table 3
(arXiv 2505.24298).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from buckeye.monitor.metrics import read_run_metrics
from buckeye.setup.demo.stages import DemoPaths, config_file, warm_started_model

LOSSES = {
    "uncorrected": {"type": "reinforce"},
    "ppo": {"type": "ppo", "clip_high": 0.28},
    "default": {},
    "decoupled": {
        "type": "decoupled_ppo",
        "clip_high": 0.28,
        "correction": {"type": "truncate", "high": 2.0},
    },
}
LAST = 10
RUN_SECONDS = 3600.0


def main() -> int:
    """Do the missing runs, and print the table."""
    args = _arguments()
    paths = DemoPaths(root=args.folder)
    model = warm_started_model(paths, seed=args.seed)
    heads = ("loss", "allowed", "staleness", "reward at the end", "seconds", "effective sample size")
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for level in args.levels:
        for loss in args.losses:
            output = args.folder / f"{loss}-{level}-{args.steps}-{args.seed}"
            if not _finished(output, args.steps):
                _train(output, model, loss, level, args)
            print(f"| {loss} | {level} | {' | '.join(_row(output))} |", flush=True)
    return 0


def _train(output: Path, model: Path, loss: str, level: int, args: argparse.Namespace) -> None:
    files = {"trainer": "train.toml", "orchestrator": "orch.toml", "inference": "infer.toml"}
    given = [word for name, file in files.items() for word in (f"--{name}", "@", str(config_file(file)))]
    settings = {
        "max-steps": args.steps,
        "max-async-level": level,
        "model.name": model,
        "orchestrator.seed": args.seed,
        "output-dir": output,
        **_flags("trainer.loss", LOSSES[loss]),
    }
    given += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with (args.folder / f"{output.name}.log").open("w") as log:
        rl = Path(sys.executable).with_name("rl")
        subprocess.run([rl, *given, "--clean"], stdout=log, stderr=log, check=True, timeout=RUN_SECONDS)


def _flags(prefix: str, settings: dict[str, object]) -> dict[str, object]:
    flags: dict[str, object] = {}
    for name, value in settings.items():
        key = f"{prefix}.{name}"
        flags |= _flags(key, value) if isinstance(value, dict) else {key: value}
    return flags


def _finished(output: Path, steps: int) -> bool:
    return steps - 1 in read_run_metrics(output / "metrics.jsonl").of("trainer")


def _row(output: Path) -> list[str]:
    run = read_run_metrics(output / "metrics.jsonl")
    trained = run.of("trainer")
    steps = list(trained)
    rewards = [reward for step, reward in run.values("orchestrator/reward/mean").items() if step in trained]
    first = trained[steps[0]]
    began = first["time"] - first["seconds"] - first["time/wait"]

    def mean(name: str) -> float:
        return statistics.fmean(trained[step][name] for step in steps if name in trained[step])

    return [
        f"{mean('staleness_mean'):.2f}",
        f"{statistics.fmean(rewards[-LAST:]):.3f}",
        f"{trained[steps[-1]]['time'] - began:.0f}",
        f"{mean('effective_sample_size'):.3f}",
    ]


def _arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 1, 2, 4, 8], help="max_async_level")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/staleness"), help="where runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
