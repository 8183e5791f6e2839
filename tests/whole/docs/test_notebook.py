"""The notebook of `examples`, as a kernel executes it from the first to the last cell."""

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from tests.places import ROOT

NOTEBOOK = ROOT / "examples" / "prompts_and_reward.ipynb"
SECONDS = 900


@pytest.mark.slow
@pytest.mark.e2e
def test_notebook_trains_on_a_function_of_its_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    first, last = map(float, re.findall(r"mean reward: ([\d.]+) in .*, ([\d.]+) in the last", printed)[0])
    assert last > first + 0.3


def test_notebook_is_saved_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
