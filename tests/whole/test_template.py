"""The project that `buckeye env new` writes works unchanged."""

import asyncio
import os
import random
import subprocess
import sys

import pytest
from tests.command import run_here
from tests.mcp.environment.scripted import Scripted

from buckeye.mcp.environment import load_environment


def run(*words, cwd, **env):
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def new(folder, name, *words):
    done = run("-m", "buckeye", "env", "new", name, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"{name}/README.md" in done.stdout.splitlines()
    for path in (folder / name).rglob("*"):
        assert "my_env" not in path.name
        if path.is_file():
            assert not {"my-env", "my_env", "MyEnv"} & set(path.read_text().replace('"', " ").split())
    return folder / name


def passes_its_tests(project):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = run(*words, cwd=project, PYTHONPATH=str(project / "src"))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_python_environment(tmp_path):
    project = new(tmp_path, "letter-game", "--kind", "python")
    passes_its_tests(project)
    done = run("-m", "buckeye", "env", "check", "letter-game", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_mcp_environment(tmp_path, monkeypatch):
    project = new(tmp_path, "dice-game")  # the default kind is an MCP server
    passes_its_tests(project)
    # as `pip install -e .` does, as far as a rollout needs it
    program = tmp_path / "bin" / "dice-game"
    program.parent.mkdir()
    server = f'PYTHONPATH="{project / "src"}" exec "{sys.executable}" -m dice_game.server'
    program.write_text(f"#!/bin/sh\n{server}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    environment = load_environment(
        dataset=str(project / "tasks.json"), config_path=str(project / "dice_game.yaml")
    )
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (24, 8)
    task = environment.tasks("train")[0]  # its seed is 0
    number = random.Random(0).randint(1, 1000)

    def play(*replies):
        policy = Scripted(*replies)
        return asyncio.run(environment.rollout(task, policy)), policy

    outcome, policy = play(
        f"<tool>guess({number - 1})</tool>", f"<tool>guess({number})</tool>", "<tool>done()</tool>"
    )
    assert outcome.error is None
    assert outcome.reward == 1.0
    outcome, policy = play(f"<tool>guess({number + 1})</tool>", "<tool>done()</tool>")
    assert "lower" in str(policy.seen)
    assert outcome.reward == 0.0


@pytest.mark.parametrize(
    "words", [("My_Game",), ("class",), ("calendar",), ("game", "--kind", "rust"), ("there",)], ids=" ".join
)
def test_wrong_usage(tmp_path, words, wording):
    (tmp_path / "there").mkdir()
    done = run_here("env", "new", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, wording)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
