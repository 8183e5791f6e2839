"""docs/published-servers.md, done as it is printed: a model learns on a server of PyPI, by a grader alone."""

import json
import statistics

import pytest
from tests.places import ROOT
from tests.whole.docs.blocks import blocks
from tests.whole.docs.tutorial_run import Place

PAGE = (ROOT / "docs" / "published-servers.md").read_text(encoding="utf-8")
PARTS = blocks(PAGE.partition("\n## 1. ")[2].partition("\n## Servers that were tried")[0])
STEPS = 30


def test_every_block_is_run_or_written():
    assert {(block.language, bool(block.file)) for block in PARTS} == {("bash", False), ("python", True)}
    assert f"--max-steps {STEPS} " in PARTS[-1].text


@pytest.mark.slow
def test_the_model_learns_what_the_grader_asks_for(tmp_path):
    place = Place(tmp_path / "page")
    for block in PARTS:
        if block.file:
            (place.folder / block.file).write_text(block.text)
        else:
            place.run(block.text)
    made = [played(place.folder / f"outputs/git/rollouts/step_{step}.jsonl") for step in range(STEPS)]
    assert statistics.mean(made[-5:]) > statistics.mean(made[:5]) + 0.1


def played(file):
    """The share of a step's rollouts that have left the branch."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert not any(record["error"] for record in records)
    return statistics.mean(record["components"]["grade/state"] for record in records)
