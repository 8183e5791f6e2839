"""The program in docs/wire.md runs as it stands."""

import subprocess
import sys

from tests.places import ROOT

from .blocks import blocks

PAGE = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")


def test_the_program_of_the_page_runs(tmp_path):
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "The dog. 1\n", ran.stderr
