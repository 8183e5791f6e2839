"""Small recipes whose curves are known: what is asked, what a beginner answers, and with which settings it is
trained. `benchmarks/bands.py` plays them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.letters import CAPITALS, LETTERS, questions

from buckeye.trainer.model.tiny import TinySize

Chat = Sequence[dict[str, str]]
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
"""Of the countries those whose capital the model gives in 20 to 80 % of its answers (arXiv 2510.26788)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`chats` of beginners, drawn with a seed, make the tiny model that reinforcement learning begins with. A
    warm start takes minutes, so all seeds begin with the same one, unless there are `own_starts`."""

    chats: Callable[[int], Iterator[Chat]]
    args: dict[str, Any]
    env: str = str(Path(__file__).with_name("letters.py"))
    tokens: int = 10
    size: TinySize = SMALL
    warm: int = 80
    warm_optim: str = "--optim.type muon --optim.betas2 0.98 --optim.lr 6e-3"
    own_starts: bool = False
    trainer: str = MUON
    steps: int = 40
    batch: int = 64
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
    "reverse-text": Recipe(
        chats=beginners("reverse", 0.8, "abcd", count=2400),
        args={"task": "reverse", "exact": True},
        size=TinySize(vocab_size=280, layers=3, hidden=192, max_length=128),
        warm=150,
        trainer=SLOWER,
        steps=60,
    ),
}
