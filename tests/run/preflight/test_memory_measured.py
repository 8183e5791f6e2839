"""The memory plan compared with the peak memory of real trainers and engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import memory

AT_MOST = 1.3  # the measured trainer did not yet keep a copy of the published weights
MEASURED = [json.loads(line) for line in (Path(__file__).parent / "memory.jsonl").read_text().splitlines()]
"""Measurements, as `benchmarks/memory.py` wrote them."""


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: f"{one['kind']}-{one['model']}-{one['length']}")
def test_plan_memory_is_close_to_measured_memory(one):
    assert 1.0 <= memory.planned(one) / one["measured"] <= AT_MOST
