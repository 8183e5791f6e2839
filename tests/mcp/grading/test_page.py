"""The examples of docs/reference/mcp-files.md are valid graders."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.mcp.grading.graders import read_graders
from tests.whole.docs.blocks import blocks

from buckeye.mcp.grading.grader_parser import fill_metadata
from buckeye.mcp.grading.judge import judge_text

_FILE = Path(__file__).parents[3] / "docs" / "reference" / "mcp-files.md"
PAGE = _FILE.read_text(encoding="utf-8").partition("\n## Graders\n")[2]


def rows(section):
    """Return the first column of a section's tables."""
    text = PAGE[PAGE.index(f"\n### {section}\n") + 1 :].split("\n### ")[0]
    return re.findall(r"^\| `([^`]+)`", text, re.M)


def graders(written):
    return read_graders(yaml.safe_load(written))


@pytest.mark.parametrize("row", rows("What a text has to be"))
def test_documented_text_tests_are_valid(row):
    assert graders(f"reply: {{{row}}}")


@pytest.mark.parametrize("row", rows("Kinds")[1:])
def test_documented_kinds_are_valid(row):
    assert graders(row)


def test_documented_graders_work(tmp_path):
    task, configuration, function = [block for block in blocks(PAGE) if block.language != "bash"]
    (grader,) = read_graders(json.loads(task.text)["grade"])
    assert [judge_text(grader.reply, text).score for text in ("It is 42.", "It is 41.")] == [1.0, 0.0]
    answer, frugal = read_graders(yaml.safe_load(configuration.text)["grade"])
    assert (answer.weight, frugal.name) == (3.0, "frugal")
    assert judge_text(fill_metadata(answer, {"answer": 7}).reply, "7").score == 1.0
    known = {}
    exec(function.text, known)
    (tmp_path / "list.txt").write_text("milk eggs")
    given = {"task": {"metadata": {"items": ["milk", "bread"]}}, "messages": [], "results": []}
    calls = [{"tool": "finish", "arguments": {}}]
    score, said = known["grade"](**given, calls=calls, workdir=tmp_path)
    assert (score, said) == (0.5, "found ['milk', 'eggs'], finished 1 times")
