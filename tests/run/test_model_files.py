"""Missing and invalid models."""

import psutil
import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_model, resolve_run
from tests.command import run_here
from tests.run.made_runs import made_run, recorded

LETTERS = """
from buckeye.envs.base import Task


class Letters:
    name = "letters"

    def tasks(self, split):
        return [Task(id="1", messages=({"role": "user", "content": "say a"},))]

    async def rollout(self, task, policy):
        raise NotImplementedError


def load_environment():
    return Letters()
"""


def test_fetch_model_refuses_adapter_and_other_directories(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        fetch_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="--merge-lora"):
        fetch_model(str(tmp_path))


COMMANDS = {
    "eval": "eval letters.py --model {}",
    "sft": "sft --model {} --data chats.jsonl",
    "chat": "chat {}",
    "serve": "serve --model {}",
    "rl": "rl --env letters.py --yes --model {}",
    "rl @": "rl @ run.toml --model {}",
}


@pytest.fixture
def models(tmp_path):
    """Folder with an SFT run, whose weights have a model, and a GGUF file."""
    for step in (20, 40):
        folder = tmp_path / "warm" / "weights" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "Small.Q4.gguf").write_text("")
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "run.toml").write_text('[trainer]\n[orchestrator]\n[[orchestrator.env]]\nid = "letters.py"')
    (tmp_path / "chats.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("warm/weight/step_40", "id you mean warm/weights/step_40?"),
        ("Small.Q4.gguf", "mport it with `buckeye model import Small.Q4.gguf small.q4`"),
    ],
)
def test_path_without_a_model_is_not_looked_up_on_the_hub(models, command, name, hint):
    done = run_here(*COMMANDS[command].format(name).split(), cwd=models)
    assert (done.returncode, "BK-MODEL-NOT-FOUND" in done.stderr) == (2, True), done.stderr
    assert hint in done.stderr
    assert "Hugging Face" not in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "warm/weights/step_100",
        "warm/wieghts",
        "wram/weights/step_20",
        "warm/x",
        "./none",
        "x/y/z",
        "warm",
        "my modèl",
    ],
)
def test_missing_path_suggests_the_nearest_model(models, monkeypatch, refusal, name):
    monkeypatch.chdir(models)
    with refusal(UsageError):
        fetch_model(name)


def test_run_directory_names_its_newest_weights_when_the_run_has_ended(tmp_path):
    ended = made_run(tmp_path / "ended")
    active = made_run(tmp_path / "active", state="running", launcher=recorded(psutil.Process()))
    for run in (ended, active):
        for step in (9, 10):
            (run / "weights" / f"step_{step}").mkdir(parents=True)
    assert resolve_run(str(ended)) == str(ended / "weights" / "step_10")
    with pytest.raises(UsageError) as refused:
        resolve_run(str(active))
    assert (refused.value.code, refused.value.at) == ("BK-MODEL-NOT-FOUND", "--model")
    assert resolve_run("org/model") == "org/model"
    assert resolve_run(str(ended / "weights" / "step_9")) == str(ended / "weights" / "step_9")


def test_name_and_id_of_a_run_are_those_of_its_newest_weights(tmp_path, monkeypatch):
    run = made_run(tmp_path / "my-run", run_id="feed1234")
    (run / "weights" / "step_3").mkdir(parents=True)
    empty = made_run(tmp_path / "no-weights", run_id="beef1234")
    monkeypatch.chdir(tmp_path / "my-run")  # so that `my-run` does not exist here
    for name in ("my-run", "feed12"):
        assert resolve_run(name) == str(run / "weights" / "step_3")
    assert resolve_run("unknown") == "unknown"
    with pytest.raises(UsageError) as refused:
        resolve_run(str(empty))
    assert refused.value.code == "BK-MODEL-NOT-FOUND"
