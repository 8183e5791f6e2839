"""Plays a recipe with several seeds, and writes the band by which a run of it is judged.

    python benchmarks/bands.py [--seeds 0 1 2 3 4] [--folder DIR] [--check]

The recipe `letters` is to write the letter e many times (benchmarks/letters.py). Each run is all of it: a
tiny model, a warm start on answers of beginners, reinforcement learning with the settings in `rl.toml` of its
folder, which `buckeye rl @ rl.toml` takes, too. All of it is in this one process. Runs that are there are not
played again. With `--check` nothing is written: the runs of these seeds are judged by the band that there is.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.letters import LETTERS, questions
from packages.audit.tests.tuning.here import carry_out

from buckeye import runs
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.trainer.sft import run_sft
from buckeye_audit.bands import band

HERE = Path(__file__).parent
FILE = Path(band.__file__).parent / "recipes" / "letters.json"
CHATS, WARM, STEPS = 1200, 60, 24
KNOWN = 0.1  # the share of letters that beginners write on purpose
RUN = """\
max_steps = {steps}
max_async_level = 0
output_dir = "{folder}/rl"
[model]
name = "{model}"
[trainer.model]
device = "cpu"
[trainer.optim]
lr = 3e-3
[inference.model]
device = "cpu"
[orchestrator]
batch_size = 64
rollouts_per_example = 8
seq_len = 128
seed = {seed}
[orchestrator.sampling]
max_tokens = 10
[[orchestrator.env]]
id = "{env}"
args = {{ task = "emit", letters = "e" }}
"""


def beginners(seed: int) -> Iterator[tuple[str, str]]:
    """Questions, and answers of somebody who knows how one looks and seldom which is right."""
    draw = random.Random(seed)
    for question, wanted in questions("emit", CHATS, letters="e", seed=seed + 1000):
        yield (
            question,
            "".join(one if draw.random() < KNOWN else draw.choice(LETTERS) for one in wanted * 8),
        )


def warm_start(folder: Path, seed: int) -> Path:
    """The model that reinforcement learning begins with."""
    pairs = list(beginners(seed))
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(folder / "base", texts=[" ".join(pair) for pair in pairs], size=size, seed=seed)
    with (folder / "chats.jsonl").open("w") as file:
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    words = ["--model.name", folder / "base", "--model.device", "cpu", "--data.path", folder / "chats.jsonl"]
    words += ["--max-steps", WARM, "--batch-size", 32, "--seq-len", 128, "--optim.lr", "1e-2", "--seed", seed]
    words += ["--output-dir", folder / "sft", "--log.level", "warning"]
    run_sft(load_config(SFTConfig, [str(word) for word in words], environ={}))
    return folder / "sft" / "weights" / f"step_{WARM}"


def play(folder: Path, seed: int) -> Path:
    """The run with a seed; it is played if it is not there."""
    run, file = folder / "rl", folder / "rl.toml"
    if (run / "weights" / f"step_{STEPS}").is_dir():
        return run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, env = warm_start(folder, seed), HERE / "letters.py"
    file.write_text(RUN.format(folder=folder, model=model, seed=seed, env=env, steps=STEPS))
    carry_out(load_config(RLConfig, ["@", str(file), "--log.level", "warning"], environ={}))
    return run


def write(played: list[Path]) -> None:
    """The recipe's file, a line for each run."""
    made = band.recipe_from([runs.open(run) for run in played], "python benchmarks/bands.py")
    rewards = ",\n  ".join(json.dumps(one) for one in made.pop("rewards"))
    text = json.dumps(made, indent=1).removesuffix("\n}")
    FILE.write_text(f'{text},\n "rewards": [\n  {rewards}\n ]\n}}\n')


def main() -> int:
    """Play what was not played; write the recipe, or judge the runs."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("outputs/bands"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    played = [play(given.folder.absolute() / f"letters-{seed}", seed) for seed in given.seeds]
    if not given.check:
        write(played)
    for run in played:
        found = band.band_of(runs.open(run))
        said = "no known recipe" if found is None else f"inside {found.inside}, differs {found.differs}"
        print(run, [round(step.reward or 0.0, 2) for step in runs.open(run).steps][::3], said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
