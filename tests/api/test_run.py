"""`buckeye.open_run`: metrics and rollouts of a run directory."""

import json
from importlib.util import find_spec

import pytest

import buckeye


@pytest.fixture
def run(tmp_path):
    """Run of two steps, with evaluations before the first and after the last one."""
    records = [
        {"process": "eval", "step": 0, "eval/letters/avg@1": 0.25},
        {"process": "orchestrator", "step": 0, "reward/mean": 0.5},
        {"process": "trainer", "step": 0, "loss": 0.125},
        {"process": "orchestrator", "step": 1, "reward/mean": 0.75},
        {"process": "trainer", "step": 1, "loss": 0.0},
        {"process": "checkpoint", "step": 2, "bytes": 7},
        {"process": "eval", "step": 2, "eval/letters/avg@1": 1.0},
    ]
    (tmp_path / "run.json").write_text("{}")
    lines = [json.dumps({"time": 1.0, "attempt": 1, **record}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return buckeye.open_run(tmp_path)


def as_rows(table):
    return table.to_dict("records") if find_spec("pandas") else table


def test_each_row_of_the_metrics_has_a_reward(run):
    rows = as_rows(run.metrics())
    assert [(row["step"], row["reward"], row["trainer/loss"]) for row in rows] == [
        (0, 0.5, 0.125),
        (1, 0.75, 0.0),
    ]


def test_evaluations_include_the_weights_after_the_last_step(run):
    assert as_rows(run.evaluations()) == [
        {"step": 0, "eval/letters/avg@1": 0.25},
        {"step": 2, "eval/letters/avg@1": 1.0},
    ]
