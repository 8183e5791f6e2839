"""The game example with few steps: warm start, gateway, training, evaluation, report."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.places import ROOT
from tests.ports import free_port

from buckeye.inference.render import ChatRenderer
from buckeye.mcp.config import load_gym_config
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from examples.text_2048 import prepare

EXAMPLE = ROOT / "examples" / "text_2048"


def shortened(folder, port):
    """Copy the example with few steps and games, and with a separate port."""
    shutil.copytree(EXAMPLE, folder)
    for name, old, new in (
        ("sft.toml", r"max_steps = \d+", "max_steps = 8"),
        ("train.toml", r"max_steps = \d+", "max_steps = 5"),
        ("train.toml", r"(warmup|decay) = \d+", r"\1 = 1"),
        ("sft.toml", r"(warmup|decay) = \d+", r"\1 = 2"),
        ("orch.toml", r"max_steps = \d+", "max_steps = 5"),
        ("orch.toml", r"batch_size = \d+", "batch_size = 16"),
        ("prepare.py", r"range\(200_000, \d+_\d+\)", "range(200_000, 200_160)"),
        ("prepare.py", r"range\(100_000, \d+_\d+\)", "range(100_000, 100_012)"),
        ("prepare.py", r"localhost:8765", f"localhost:{port}"),
        ("run.sh", r"localhost:8765", f"localhost:{port}"),
        ("run.sh", r"buckeye gateway", f"buckeye gateway --port {port}"),
        ("run.sh", r"sft/weights/step_\d+", "sft/weights/step_8"),
        ("run.sh", r"rl/weights/step_\d+", "rl/weights/step_5"),
    ):
        text, count = re.subn(old, new, (folder / name).read_text())
        assert count, (name, old)
        (folder / name).write_text(text)
    return folder / "run.sh"


def test_a_call_and_a_whole_game_fit_into_the_tokens_that_they_have(tmp_path):
    config = load_gym_config(EXAMPLE / "2048.yaml")
    games = [prepare.conversation(config, seed)["messages"] for seed in prepare.CONVERSATIONS[:60]]
    texts = [" ".join(message["content"] for message in game).replace("\n", " ") for game in games]
    size = TinySize(vocab_size=512, layers=1, hidden=64)
    make_tiny_model(tmp_path / "base", texts=texts + prepare.WORDS * 2, size=size, seed=0)
    renderer = ChatRenderer(tmp_path / "base")
    settings = tomllib.loads((EXAMPLE / "orch.toml").read_text())
    call = max(len(renderer.encode(f'<tool>move("{where}")</tool>')) for where in prepare.DIRECTIONS)
    longest = max(len(renderer.render(game[:-1]).ids) for game in games)
    marked = [len(renderer.render(game[:3]).ids) - len(renderer.render(game[:2]).ids) for game in games]
    assert max(marked) < settings["sampling"]["max_tokens"]
    assert longest + call < settings["seq_len"]


@pytest.mark.slow
def test_it_runs_from_the_beginning_to_the_report(tmp_path):
    script = shortened(tmp_path / "example", free_port())
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BUCKEYE_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        ["sh", str(script), str(tmp_path / "out")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = re.findall(r"^(.+?)  +(\d\.\d+)  \[(\d\.\d+), (\d\.\d+)\]  12 games$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["random moves", "before", "after"]
    assert all(float(low) <= float(mean) <= float(high) for _, mean, low, high in rows)
    assert "forked from a process" in (tmp_path / "out" / "gateway.log").read_text()
