"""Keys of a judge reach an environment by name in every command that runs rollouts."""

import json
import os

import pytest
from tests.command import run_here
from tests.evaluation.chat_server import chat_server

JUDGED = """
import os

from buckeye.envs.base import Outcome, Task


class Judged:
    name = "judged"

    def tasks(self, split):
        return {"train": [Task(id="t", messages=({"role": "user", "content": "Say yes."},))]}[split]

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        key = os.environ.get("JUDGE_API_KEY")
        if key is None:
            raise RuntimeError("Missing credentials. Set the `JUDGE_API_KEY` environment variable.")
        return Outcome(reward=float(key == "sesame" and reply.text == "yes"))


def load_environment(at_load=False):
    if at_load:
        os.environ["JUDGE_API_KEY"]
    return Judged()
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "judged.py").write_text(JUDGED)
    (tmp_path / ".env").write_text("JUDGE_API_KEY=sesame\n")
    return tmp_path


def judged(project, *words):
    env = {name: value for name, value in os.environ.items() if name != "JUDGE_API_KEY"}
    return run_here(*words, cwd=project, env={**env, "BUCKEYE_HOME": str(project / "home")})


def evaluate(project, *words):
    with chat_server(lambda body, _: "yes") as (url, _):
        server = ("--base-url", url, "--model", "m", "--output-dir", "out", "--retries", "0", "--json")
        return judged(project, "eval", "./judged.py", *server, *words)


def test_an_evaluation_gives_the_environment_the_key_that_is_named(project):
    done = evaluate(project, "--variables", "JUDGE_API_KEY")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward"]["value"] == 1.0


@pytest.mark.parametrize(("words", "code"), [((), 1), (("--arg", "at_load=true"), 2)])
def test_missing_credentials_say_which_variable_and_how(project, words, code):
    done = evaluate(project, *words)
    assert done.returncode == code
    assert "--variables JUDGE_API_KEY" in done.stderr


@pytest.mark.e2e
def test_a_check_gives_the_environment_the_key_that_is_named(project):
    words = ("env", "check", "./judged.py", "--budget", "5", "--json")
    without, named = judged(project, *words), judged(project, *words, "--variables", "JUDGE_API_KEY")
    graded = [
        {check["name"]: check for check in json.loads(done.stdout)["checks"]}["every reply is graded"]
        for done in (without, named)
    ]
    assert [check["status"] for check in graded] == ["error", "pass"]
    assert json.loads(named.stdout)["errored"] == 0


@pytest.mark.parametrize("words", [("eval", "./judged.py", "--model", "m"), ("env", "check", "./judged.py")])
def test_a_key_that_is_nowhere_is_asked_for_before_anything_is_played(project, words):
    done = judged(project, *words, "--variables", "JUDGE_API_KEY,OTHER_API_KEY")
    assert done.returncode == 2
    assert "OTHER_API_KEY" in done.stderr
