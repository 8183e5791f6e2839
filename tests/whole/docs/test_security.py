"""The page on security: what it says is tested is."""

from __future__ import annotations

import re

from tests.places import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
ROWS = [
    line.split("|")[1:-1] for line in PAGE.partition("## Keys")[0].splitlines() if line.startswith("| **")
]


def test_every_row_names_tests_that_exist():
    assert len(ROWS) >= 11
    for row in ROWS:
        named = re.findall(r"`([\w/.]+)`", row[-1])
        assert named, row[0]
        for name in named:
            file = ROOT / (name if name.endswith(".py") else f"tests/whole/security/{name}.py")
            assert "def test_" in file.resolve().read_text(encoding="utf-8"), name


def test_every_file_of_tests_is_named():
    files = {path.stem for path in (ROOT / "tests/whole/security").glob("test_*.py")}
    assert files == {name for row in ROWS for name in re.findall(r"`(test_\w+)`", row[-1])}
