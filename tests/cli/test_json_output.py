"""JSON of commands whose output is otherwise text."""

import json
import re
from pathlib import Path

import pytest

from buckeye.base.explanations import explanations
from tests.command import run_here
from tests.ui.made import make_run
from tests.whole.docs.reference_tool import reference


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
    "rl logs": ("recorded", "-n", "1"),
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
def test_objects_have_the_described_keys(recorded, command):
    done = run_here(*command.split(), *READERS[command], "--json", cwd=recorded)
    assert done.returncode in (0, 1), done.stderr
    described = re.findall(r"`(\w+)`", reference.TEXTS["json"][command].partition("; evaluations:")[0])
    found = set(re.findall(r'"(\w+)":', done.stdout))
    assert [key for key in described if key not in found] == []
    outer = json.loads(done.stdout).keys()
    assert outer - set(described) == set()
