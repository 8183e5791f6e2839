"""Plays recipes with several seeds, and writes the bands by which runs of them are judged.

    python -m benchmarks.bands [RECIPE ...] [--seeds 0 1 2 3 4] [--folder DIR] [--check]

benchmarks/recipes.py says what they are. A run is all of it: a tiny model, a warm start on the chats of
beginners, reinforcement learning with the settings in `rl.toml` of its folder, which `buckeye rl @ rl.toml`
takes, too. All of it is in this one process; but `demo` is what `buckeye demo` runs, in the processes of its
commands. Runs that are there are not played again. With `--check` nothing is written: the runs of these seeds
are judged by the bands that there are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recipes import RECIPES, Recipe
from packages.audit.tests.tuning.here import carry_out

from buckeye import runs
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.trainer.model.tiny import make_tiny_model
from buckeye.trainer.sft import run_sft
from buckeye_audit.bands import band
from buckeye_audit.demo.stages import DemoPaths, reinforce, warm_started_model

DEMO = "demo"
NAMES = (*RECIPES, DEMO)
FILES = Path(band.__file__).parent / "recipes"
RUN = """\
max_steps = {recipe.steps}
max_async_level = 0
output_dir = "{folder}/rl"
[model]
name = "{model}"
[trainer.model]
device = "cpu"
{recipe.trainer}[inference.model]
device = "cpu"
[orchestrator]
batch_size = {recipe.batch}
rollouts_per_example = {recipe.group}
seq_len = 128
seed = {seed}
[orchestrator.sampling]
max_tokens = {recipe.tokens}
[[orchestrator.env]]
id = "{recipe.env}"
args = {{ {args} }}
"""


def warm_start(recipe: Recipe, folder: Path, seed: int) -> Path:
    """The model that reinforcement learning begins with; it is made if it is not there."""
    model = folder / "sft" / "weights" / f"step_{recipe.warm}"
    if model.is_dir():
        return model
    shutil.rmtree(folder, ignore_errors=True)
    chats = list(recipe.chats(seed))
    texts = [" ".join(message["content"] for message in chat) for chat in chats]
    make_tiny_model(folder / "base", texts=texts, size=recipe.size, seed=seed)
    lines = [json.dumps({"messages": list(chat)}) + "\n" for chat in chats]
    (folder / "chats.jsonl").write_text("".join(lines))
    words = ["--model.name", folder / "base", "--model.device", "cpu", "--data.path", folder / "chats.jsonl"]
    words += ["--max-steps", recipe.warm, "--batch-size", 32, "--seq-len", 128, "--seed", seed]
    words += [*recipe.warm_optim.split(), "--output-dir", folder / "sft", "--log.level", "warning"]
    words += ["--ckpt.interval", recipe.warm]
    run_sft(load_config(SFTConfig, [str(word) for word in words], environ={}))
    return model


def play(name: str, folder: Path, seed: int) -> Path:
    """The run of a recipe with a seed, in `folder`; it is played if it is not there."""
    if name == DEMO:
        return play_demo(folder, seed)
    recipe, here = RECIPES[name], folder / f"{name}-{seed}"
    run = here / "rl"
    if (run / "weights" / f"step_{recipe.steps}").is_dir():
        return run
    shutil.rmtree(run, ignore_errors=True)
    start = (here, seed) if recipe.own_starts else (folder / f"{name}-start", 0)
    file = write_settings(recipe, here, warm_start(recipe, *start), seed)
    carry_out(load_config(RLConfig, ["@", str(file), "--log.level", "warning"], environ={}))
    return run


def play_demo(folder: Path, seed: int) -> Path:
    """The run of the demonstration, from a warm start that all seeds share."""
    start, paths = (DemoPaths(root=folder / f"{DEMO}-{name}") for name in ("start", seed))
    warm_started_model(start, seed=0)
    paths.root.mkdir(exist_ok=True)
    if not paths.sft.is_symlink():
        paths.sft.symlink_to(start.sft)
    reinforce(paths, seed=seed)
    return paths.rl


def write_settings(recipe: Recipe, folder: Path, model: Path, seed: int) -> Path:
    """The file in `folder` that `buckeye rl` takes for a run which begins with `model`."""
    folder.mkdir(exist_ok=True)
    args, file = in_toml(recipe.args), folder / "rl.toml"
    file.write_text(RUN.format(recipe=recipe, folder=folder, model=model, seed=seed, args=args))
    return file


def in_toml(values: Mapping[str, Any]) -> str:
    """What stands in an inline table; of words, numbers, booleans and lists."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


def write(name: str, played: list[Path]) -> None:
    """The recipe's file, a line for each run."""
    made = band.recipe_from([runs.open(run) for run in played], f"python -m benchmarks.bands {name}")
    rewards = ",\n  ".join(json.dumps(one) for one in made.pop("rewards"))
    text = json.dumps(made, indent=1).removesuffix("\n}")
    (FILES / f"{name}.json").write_text(f'{text},\n "rewards": [\n  {rewards}\n ]\n}}\n')


def judged(found: band.Band) -> str:
    """What is printed of a run of a known recipe."""
    return f"{found.told}: {'inside' if found.inside else 'below'} the band"


def main() -> int:
    """Play what was not played; write the recipes, or judge the runs."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("outputs/bands"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    os.environ["BUCKEYE_THREADS"] = "1"
    for name in given.recipes or NAMES:
        folder = given.folder.absolute()
        played = [play(name, folder, seed) for seed in given.seeds]
        if not given.check:
            write(name, played)
        for run in played:
            opened = runs.open(run)
            rewards = [
                round(earned, 2) for step in opened.steps if (earned := step.played_reward) is not None
            ]
            found = band.band_of(opened)
            print(run, rewards[::3], "no known recipe" if found is None else judged(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
