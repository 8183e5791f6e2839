"""docs/variables.md names every environment variable of Buckeye, and modules that read it."""

from __future__ import annotations

import re

import pytest
from tests.places import ROOT

PAGE = (ROOT / "docs/variables.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`BUCKEYE_.+?) \| (`.+?) \|", PAGE, re.M)


def test_every_variable_of_the_code_is_on_the_page():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/buckeye").rglob("*.py"))
    assert set(re.findall(r"\bBUCKEYE_[A-Z_]+\b", text)) == set(re.findall(r"`(BUCKEYE_[A-Z_]+)`", PAGE)) - {
        "BUCKEYE_TORCH"
    }


@pytest.mark.parametrize(
    "modules", sorted({module for _, modules in ROWS for module in re.findall(r"`(.+?)`", modules)})
)
def test_every_module_exists(modules):
    assert (ROOT / "src/buckeye" / modules).exists()
