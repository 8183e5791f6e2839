"""Wrong inputs of every kind: one message (what, where, what to do), the right exit code, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import run_here

TRAIN = 'max_steps = 2\n\n[model]\nname = "nowhere/to-be-found"\n'
ORCH = 'batch_size = 8\nrollouts_per_example = 4\n\n[[env]]\nid = "harleycooper/dakota1890"\n'
FILES = ("--trainer", "@", "train.toml", "--orchestrator", "@", "orch.toml", "--inference", "@", "infer.toml")

_LINES = (Path(__file__).parent / "malformed.jsonl").read_text("utf-8").splitlines()
CASES = {case["name"]: case for case in map(json.loads, _LINES)}
"""Arguments after `buckeye` (`FILES`: those above), exit code, and files to write or replace, by name."""

QUICK = ("unquoted string", "resuming from nothing", "misspelt command")
"""Cases that `make test-all` also runs in a separate process: one per kind of exit."""


@pytest.fixture
def try_case(tmp_path, tiny_model):
    """Return a function that runs a case with `function` and returns the standard error."""

    def run(name, function):
        case = CASES[name]
        files = {"train.toml": TRAIN, "orch.toml": ORCH, "infer.toml": "", **case.get("files", {})}
        for file, text in files.items():
            (tmp_path / file).write_text(text)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_"))}
        words = " ".join(case["words"]).replace("FILES", " ".join(FILES)).format(model=tiny_model).split()
        done = function(words, cwd=tmp_path, env=kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"})
        assert done.returncode == case["code"], done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        assert 1 <= done.stderr.lower().count("error") <= 2, done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize("name", CASES)
def test_malformed_input(name, try_case, wording):
    said = try_case(name, lambda words, **options: run_here(*words, **options))
    assert said.partition(" the Hugging Face hub: ")[0] == wording  # the rest is from a library


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_malformed_input_of_a_process_of_its_own(name, try_case):
    def run(words, **options):
        argv = [sys.executable, "-m", "buckeye", *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False, **options)

    try_case(name, run)
