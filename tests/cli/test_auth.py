"""`buckeye auth` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

from tests.command import run_here


@pytest.fixture
def auth(tmp_path):
    """Return a function that runs the command in an empty folder with a separate home directory."""
    (tmp_path / "project").mkdir()

    def run(*words, text=None, **variables):
        env = {name: value for name, value in os.environ.items() if not name.endswith(("_KEY", "_TOKEN"))}
        env |= {"HOME": str(tmp_path), "BUCKEYE_HOME": str(tmp_path / ".buckeye"), **variables}
        if text is None:
            return run_here("auth", *words, cwd=tmp_path / "project", env=env)
        return subprocess.run(
            [sys.executable, "-m", "buckeye", "auth", *words],
            cwd=tmp_path / "project",
            env=env,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_auth_set_reads_a_pipe_and_status_masks_the_value(auth, tmp_path):
    done = auth("set", "HF_TOKEN", text="hf_plantedplantedplanted\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "planted" not in done.stdout
    assert (tmp_path / ".buckeye" / ".env").read_text() == "HF_TOKEN=hf_plantedplantedplanted\n"

    status = auth("status", "--json", PRIME_API_KEY="prime-planted-key", WANDB_API_KEY="w")
    keys = {one["name"]: one for one in json.loads(status.stdout)["keys"]}
    assert keys["HF_TOKEN"]["where"] == str(tmp_path / ".buckeye" / ".env")
    assert keys["HF_TOKEN"]["masked"] == "hf_…ed"
    assert (keys["PRIME_API_KEY"]["where"], keys["OPENAI_API_KEY"]["where"]) == ("environment", None)
    text = auth("status", PRIME_API_KEY="prime-planted-key").stdout
    assert "planted" not in status.stdout + text
    assert "OPENAI_API_KEY" in text


def test_auth_set_refuses_a_value_in_the_command_and_does_not_print_it(auth, tmp_path, wording):
    for words in (("set", "HF_TOKEN", "hf_planted"), ("set", "HF_TOKEN=hf_planted")):
        done = auth(*words)
        assert done.returncode == 2
        assert done.stderr == wording
        assert "planted" not in done.stdout + done.stderr
    assert not (tmp_path / ".buckeye").exists()
