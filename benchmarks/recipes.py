"""Small recipes: questions, answers of beginners, and training settings.

`benchmarks/tune.py` trains them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.letters import CAPITALS, LETTERS, questions

from buckeye.config.load import load_config
from buckeye.config.sft import SFTConfig
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.trainer.sft import run_sft

Chat = Sequence[dict[str, str]]
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
SMALL = TinySize(vocab_size=400, layers=1, hidden=64, max_length=256)
MUON = """\
[trainer.optim]
type = "muon"
lr = 3e-3
betas2 = 0.98
"""
SLOWER = MUON.replace("3e-3", "1e-3")
FALLING = """\
[trainer.scheduler]
type = "linear"
decay = 150
"""
HALF_KNOWN = (
    *("Cuba", "Egypt", "France", "Ghana", "Greece", "India", "Italy", "Kenya"),
    *("Latvia", "Norway", "Peru", "Poland", "Spain"),
)
"""Countries whose capital the model gives in 20 to 80 % of its answers (as in arXiv 2510.26788)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Recipe of a training run.

    Reinforcement learning starts from a tiny model, trained on `chats` of beginners that a seed determines.
    This warm start takes minutes, so all seeds share it.
    """

    chats: Callable[[int], Iterator[Chat]]
    args: dict[str, Any]
    env: str = str(Path(__file__).with_name("letters.py"))
    tokens: int = 10
    size: TinySize = SMALL
    warm: int = 80
    warm_optim: str = "--optim.type muon --optim.betas2 0.98 --optim.lr 6e-3"
    trainer: str = MUON
    steps: int = 40
    batch: int = 64
    group: int = 8


def beginners(
    task: str, known: float, parts: Sequence[str], count: int = 1200, **asked: Any
) -> Callable[[int], Iterator[Chat]]:
    """Return chats of a beginner who knows a share of an answer's `parts`, which are letters or all of it."""

    def chats(seed: int) -> Iterator[Chat]:
        draw = random.Random(seed)
        for question, wanted in questions(task, count, seed=seed + 1000, **asked):
            right = [wanted] if wanted in CAPITALS.values() else list(wanted * (8 if task == "emit" else 1))
            answer = "".join(part if draw.random() < known else draw.choice(parts) for part in right)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    return chats


RECIPES = {
    "letters": Recipe(
        chats=beginners("emit", 0.1, LETTERS, letters="e"),
        args={"task": "emit", "letters": "e"},
        size=TinySize(vocab_size=310, layers=1, hidden=64, max_length=128),
        warm=60,
        warm_optim="--optim.lr 1e-2",
        trainer="[trainer.optim]\nlr = 3e-3\n",
        steps=24,
    ),
    "capitals": Recipe(
        chats=beginners("capital", 0.5, list(CAPITALS.values())),
        args={"task": "capital", "exact": True},
        group=4,
    ),
    "sanity": Recipe(
        chats=beginners("capital", 0.5, list(CAPITALS.values())),
        args={
            "task": "capital",
            "exact": True,
            "only": [f"What is the capital of {name}?" for name in HALF_KNOWN],
        },
        trainer=SLOWER + FALLING,
        batch=256,
        group=16,
        steps=200,
    ),
}


def warm_start(recipe: Recipe, folder: Path, seed: int) -> Path:
    """Return the start model of reinforcement learning; make it if it is missing."""
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
    run_sft(load_config(SFTConfig, [str(word) for word in words]))
    return model


def write_settings(recipe: Recipe, folder: Path, model: Path, seed: int) -> Path:
    """Write the settings file for a run of `buckeye rl` that starts from `model`; return its path."""
    folder.mkdir(exist_ok=True)
    args, file = in_toml(recipe.args), folder / "rl.toml"
    file.write_text(RUN.format(recipe=recipe, folder=folder, model=model, seed=seed, args=args))
    return file


def in_toml(values: Mapping[str, Any]) -> str:
    """Return the content of an inline table; values are strings, numbers, booleans and lists."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
