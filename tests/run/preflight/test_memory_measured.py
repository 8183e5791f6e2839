"""The memory plan against what real trainers and engines take at most."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import memory
from inference_models import make_model

AT_MOST = 1.25
MEASURED = [json.loads(line) for line in (Path(__file__).parent / "memory.jsonl").read_text().splitlines()]
"""As `benchmarks/memory.py` wrote them."""


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: f"{one['kind']}-{one['model']}-{one['length']}")
def test_what_was_measured_is_planned_and_not_much_more(one):
    assert 1.0 <= memory.planned(one) / one["measured"] <= AT_MOST


def test_the_shapes_are_many():
    assert {(one["kind"], one["model"]) for one in MEASURED} >= {
        (kind, model) for kind in memory.KINDS for model in ("30M", "135M")
    }
    assert len(MEASURED) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length", "words"),
    [
        ("engine", 512, ()),
        ("full", 1024, ()),
        ("full", 512, ("--trainer.model.ac",)),
        ("full", 512, ("--trainer.model.compute-dtype", "float32", "--trainer.optim.type", "sgd")),
        ("lora", 1024, ()),
    ],
    ids=["engine", "trainer", "recomputed", "float32 and SGD", "LoRA"],
)
def test_here_it_is_so_too(tmp_path, kind, length, words):
    """Libraries and processors differ by more than the shapes that were fitted to."""
    model = make_model(tmp_path, "30M")
    planned = memory.planned(memory.case(kind, model, length, words))
    held = memory.measured(kind, model, length, words)
    print(f"{kind} {length} {words}: planned {planned / 1e9:.2f} GB, measured {held / 1e9:.2f} GB")
    assert 0.9 <= planned / held <= 1.5
