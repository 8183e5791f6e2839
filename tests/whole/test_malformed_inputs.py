"""Wrong inputs of every kind: one message (what, where, what to do), the right exit code, no traceback."""

import os
import subprocess
import sys

import pytest
from tests.command import run_here

TRAIN = 'max_steps = 2\n\n[model]\nname = "nowhere/to-be-found"\n'
ORCH = 'batch_size = 8\nrollouts_per_example = 4\n\n[[env]]\nid = "harleycooper/dakota1890"\n'
FILES = ("--trainer", "@", "train.toml", "--orchestrator", "@", "orch.toml", "--inference", "@", "infer.toml")

# name: (files to write or replace, words after `buckeye`, exit code, what the message must hold)
CASES = {
    "unquoted string": (
        {"train.toml": TRAIN.replace('"nowhere/to-be-found"', "nowhere/to-be-found")},
        ("rl", *FILES),
        2,
        ("train.toml", "4", "^", 'name = "nowhere/to-be-found"'),
    ),
    "unclosed string": ({"train.toml": 'output_dir = "out\n'}, ("rl", *FILES), 2, ("train.toml", "1", "^")),
    "python boolean": ({"train.toml": "bench = True\n"}, ("rl", *FILES), 2, ("train.toml", "true")),
    "unknown key": ({"train.toml": "max_step = 5\n"}, ("rl", *FILES), 2, ("train.toml:1", "max_steps")),
    "unknown key in a section": (
        {"train.toml": "[optim]\nlearning_rate = 1e-5\n"},
        ("rl", *FILES),
        2,
        ("train.toml:2", "lr"),
    ),
    "unknown flag": ({}, ("rl", *FILES, "--trainer.max-step", "5"), 2, ("--trainer.max-step", "max-steps")),
    "text for a number": (
        {"orch.toml": f'seq_len = "long"\n{ORCH}'},
        ("rl", *FILES),
        2,
        ("orch.toml:1", "long"),
    ),
    "number out of range": ({}, ("rl", *FILES, "--orchestrator.batch-size", "0"), 2, ("batch-size", "0")),
    "flag without a value": ({}, ("rl", *FILES, "--max-steps"), 2, ("--max-steps",)),
    "file that is missing": ({}, ("rl", "--trainer", "@", "nope.toml"), 2, ("nope.toml",)),
    "at sign without a file": ({}, ("rl", "--trainer", "@"), 2, ("@",)),
    "stray word": ({}, ("rl", "train.toml"), 2, ("train.toml",)),
    "two places disagree": (
        {"orch.toml": f"max_steps = 3\n{ORCH}"},
        ("rl", *FILES),
        2,
        ("train.toml:1", "orch.toml:1", "2", "3"),
    ),
    "groups that do not divide the batch": (
        {},
        ("rl", *FILES, "--orchestrator.rollouts-per-example", "3"),
        2,
        ("8", "3"),
    ),
    "devices that contradict dp": (
        {},
        ("rl", *FILES, "--inference-gpu-ids", "0,1", "--inference.parallel.dp", "3"),
        2,
        ("dp",),
    ),
    "truncated sampling": (
        {},
        ("rl", *FILES, "--orchestrator.sampling.top-p", "0.9"),
        2,
        ("top-p", "no such setting"),
    ),
    "model that is nowhere": ({}, ("rl", *FILES), 2, ("nowhere/to-be-found",)),
    "environment that is not installed": (
        {},
        ("eval", "harleycooper/dakota1891", "--model", "{model}"),
        2,
        ("dakota1891", "pip install"),
    ),
    "resuming from nothing": (
        {},
        ("rl", *FILES, "--resume", "--output-dir", "fresh"),
        1,
        ("checkpoint", "fresh"),
    ),
    "not a model directory": ({}, ("serve", "--model.name", "."), 2, ("config.json",)),
    "public address without a key": (
        {},
        ("serve", "--model.name", "{model}", "--server.host", "0.0.0.0"),
        2,
        ("key",),
    ),
    "chats that are not chats": (
        {"chats.jsonl": '{"text": "hello"}\n'},
        ("sft", "--data.path", "chats.jsonl", "--model.name", "{model}", "--output-dir", "sft"),
        2,
        ("chats.jsonl", "1", "messages"),
    ),
    "misspelt command": ({}, ("evla",), 2, ("eval",)),
    "existing model": ({}, ("model", "tiny", "{model}"), 2, ("exists",)),
    "schema of something": ({}, ("rl", "schema", "a", "b"), 2, ("directory",)),
}

QUICK = ("unquoted string", "resuming from nothing", "misspelt command")
"""Those that `make test` also tries in a process of their own: one of every way to end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from buckeye.trainer.model.tiny import TinySize, make_tiny_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    size = TinySize(vocab_size=300, layers=1, hidden=64, max_length=128)
    make_tiny_model(path, texts=["a b c"] * 4, size=size, seed=0)
    return path


@pytest.fixture
def written(tmp_path):
    """The files of a case, and the environment variables of its command."""

    def write(files):
        for file, text in {"train.toml": TRAIN, "orch.toml": ORCH, "infer.toml": "", **files}.items():
            (tmp_path / file).write_text(text)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_"))}
        return kept | {"HF_HUB_OFFLINE": "1"}

    return write


def check(done, code, expected):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for part in expected:
        assert part in done.stderr, (part, done.stderr)
    assert done.stderr.lower().count("error") <= 2, done.stderr


@pytest.mark.parametrize("name", CASES)
def test_malformed_input(name, tmp_path, model, written):
    files, words, code, expected = CASES[name]
    done = run_here(*(word.format(model=model) for word in words), cwd=tmp_path, env=written(files))
    check(done, code, expected)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_malformed_input_of_a_process_of_its_own(name, tmp_path, model, written):
    files, words, code, expected = CASES[name]
    argv = [sys.executable, "-m", "buckeye", *(word.format(model=model) for word in words)]
    done = subprocess.run(argv, cwd=tmp_path, env=written(files), capture_output=True, text=True, check=False)
    check(done, code, expected)
