"""The examples run as they stand."""

import runpy
import sys

import pytest
from tests.places import ROOT

from buckeye.trainer.model.tiny import TinySize, make_tiny_model

EXAMPLES = ROOT / "examples"


@pytest.mark.e2e
def test_rl_loop(tmp_path, monkeypatch, capsys):
    size = TinySize(vocab_size=320, layers=1, hidden=64, max_length=256)
    make_tiny_model(
        tmp_path / "tiny", texts=["Put only the form in <answer></answer>."] * 9, size=size, seed=0
    )
    words = ("--steps", "2", "--groups", "2", "--group-size", "2", "--max-tokens", "4")
    argv = ["rl_loop.py", str(tmp_path / "tiny"), *words, "--save", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(EXAMPLES / "rl_loop.py"), run_name="__main__")
    assert capsys.readouterr().out.count("| reward ") == 2
    assert (tmp_path / "out" / "model.safetensors").exists()
