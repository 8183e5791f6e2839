"""Small recipes whose curves are known: what is asked, what a beginner answers, and with which settings it is
trained. `benchmarks/bands.py` plays them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.letters import CAPITALS, LETTERS, questions
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.trainer.model.tiny import TinySize

Chat = Sequence[dict[str, str]]
SMALL = TinySize(vocab_size=400, layers=1, hidden=64, max_length=256)
MUON = """\
[trainer.optim]
type = "muon"
lr = 3e-3
betas2 = 0.98
"""
FALLING = """\
[trainer.scheduler]
type = "linear"
decay = 40
"""
SAMPLES = 24  # answers to a task
EASY, HARD = 0.8, 0.2  # if more, or fewer, of them are right


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`chats` of beginners, drawn with a seed, make the tiny model that reinforcement learning begins with;
    `more` are arguments of the environment that need a folder, or that model. A warm start takes minutes, so
    all seeds begin with the same one, unless there are `own_starts`."""

    chats: Callable[[int], Iterator[Chat]]
    args: dict[str, Any]
    more: Callable[[Path, Path], dict[str, Any]] = lambda folder, model: {}
    size: TinySize = SMALL
    warm: int = 80
    warm_optim: str = "--optim.type muon --optim.betas2 0.98 --optim.lr 6e-3"
    own_starts: bool = False
    trainer: str = MUON
    steps: int = 40
    group: int = 8


def beginners(
    task: str, known: float, parts: Sequence[str], count: int = 1200, **asked: Any
) -> Callable[[int], Iterator[Chat]]:
    """Chats of somebody who knows a share of an answer's `parts`, which are letters or all of it."""

    def chats(seed: int) -> Iterator[Chat]:
        draw = random.Random(seed)
        for question, wanted in questions(task, count, seed=seed + 1000, **asked):
            right = [wanted] if wanted in CAPITALS.values() else list(wanted * (8 if task == "emit" else 1))
            answer = "".join(part if draw.random() < known else draw.choice(parts) for part in right)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    return chats


def neither_easy_nor_hard(folder: Path, model: Path) -> dict[str, str]:
    """Of all countries those whose capital the model gives now and then (arXiv 2510.26788)."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    sampled = {"do_sample": True, "top_k": 0, "num_return_sequences": SAMPLES, "max_new_tokens": 10}
    kept = []
    for question, wanted in sorted(set(questions("capital", 4000))):
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        said = policy.generate(**asked, **sampled)[:, asked["input_ids"].shape[1] :]
        answers = [answer.strip() for answer in tokenizer.batch_decode(said, skip_special_tokens=True)]
        if HARD <= answers.count(wanted) / SAMPLES <= EASY:
            kept.append(question)
    (folder / "kept.json").write_text(json.dumps(kept))
    return {"only": f"{folder}/kept.json"}


RECIPES = {
    "letters": Recipe(
        chats=beginners("emit", 0.1, LETTERS, letters="e"),
        args={"task": "emit", "letters": "e"},
        size=TinySize(vocab_size=310, layers=1, hidden=64, max_length=128),
        warm=60,
        warm_optim="--optim.lr 1e-2",
        own_starts=True,
        trainer="[trainer.optim]\nlr = 3e-3\n",
        steps=24,
    ),
    "capitals": Recipe(
        chats=beginners("capital", 0.5, list(CAPITALS.values())),
        args={"task": "capital", "exact": True},
        group=4,
    ),
    "sanity": Recipe(
        chats=beginners("capital", 0.6, list(CAPITALS.values())),
        args={"task": "capital", "exact": True},
        more=neither_easy_nor_hard,
        size=TinySize(vocab_size=400, layers=2, hidden=64, max_length=512),
        trainer=MUON + FALLING,
        steps=48,
        group=4,
    ),
}
