"""Rollouts run by `verifiers`, v0 and v1, with the embedded engine."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments.dakota1890.tests.verifiers_python import verifiers_python

from buckeye.envs.base import Reply
from buckeye.inference.render import ChatRenderer
from buckeye.launch.serve import served_model
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from dakota1890.environment import load_environment

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
SCRIPTS = HERE / "verifiers_venvs"
VERSIONS = ("v0", "v1")
ARGS = {"families": ["conjugate", "numerals"], "hints": "none", "num_train": 12}
TASKS, ROLLOUTS, MAX_TOKENS = 8, 2, 40

pytestmark = pytest.mark.slow


def run(*argv, limit=600, **environment):
    """Run a command without the user's settings; a failure contains its output."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PRIME_", "BUCKEYE_", "PYTHON"))
    }
    done = subprocess.run(
        list(map(str, argv)),
        env={**kept, "HF_HUB_OFFLINE": "1", "BUCKEYE_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"{argv[:4]} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def python_with_verifiers(version):
    """Return the Python of a virtual environment with this `verifiers` and the working tree's dakota1890."""
    python = verifiers_python(version)
    local = ("--no-deps", "--no-build-isolation", "--force-reinstall")
    run(python, "-m", "pip", "install", "-q", *local, PROJECT)
    return python


@pytest.fixture(scope="module")
def pythons():
    return {version: python_with_verifiers(version) for version in VERSIONS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Tiny model that has memorized most train tasks, so that there are rewards to compare."""
    root = tmp_path_factory.mktemp("model")
    chats = [list(chat) for chat in load_environment(**ARGS).demonstrations()]
    (root / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats * 10))
    texts = [message["content"] for chat in chats for message in chat]
    size = TinySize(vocab_size=512, layers=2, hidden=128, max_length=256)
    make_tiny_model(root / "base", texts=texts * 5, size=size, seed=0)
    settings = ("--max-steps", "60", "--batch-size", "24", "--optim.type", "muon", "--optim.lr", "6e-3")
    paths = ("--model.name", root / "base", "--data.path", root / "chats.jsonl", "--output-dir", root / "sft")
    run(sys.executable, "-m", "buckeye", "sft", *paths, *settings)
    return root / "sft" / "weights" / "step_60"


@pytest.fixture(scope="module")
def played(pythons, model, tmp_path_factory):
    """Rollouts by version and split."""
    root = tmp_path_factory.mktemp("played")

    def play(version, server):
        job = {"env": "harleycooper/dakota1890", "args": ARGS, "splits": ["train", "eval"]}
        job |= {"base_url": server.base_url, "model": server.model, "tasks": TASKS, "rollouts": ROLLOUTS}
        job |= {"sampling": {"max_tokens": MAX_TOKENS, "temperature": 0.7}}
        job |= {"harness": "one_turn_harness", "renderer": server.model}
        (root / f"{version}.json").write_text(json.dumps(job))
        out = root / f"{version}-out.json"
        script = SCRIPTS / f"play_{version}.py"
        home = {"HOME": str(root), "ENGINE_KEY": server.api_key}
        run(pythons[version], script, root / f"{version}.json", out, **home)
        return json.loads(out.read_text())

    async def play_all():
        async with served_model(model) as server:
            return {version: await asyncio.to_thread(play, version, server) for version in VERSIONS}

    return asyncio.run(play_all())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_rewards_are_those_of_buckeyes_own_grade(played, version, split):
    environment = load_environment(**ARGS)
    tasks = {task.id: task for task in environment.tasks(split)}
    rollouts = played[version][split]
    assert len(rollouts) == TASKS * ROLLOUTS
    for rollout in rollouts:
        assert rollout["error"] is None
        task = tasks[rollout["task_id"]]
        finish = "length" if rollout["truncated"] else "stop"
        message = {"role": "assistant", "content": rollout["reply"]}
        outcome = environment.grade(task, Reply(text=rollout["reply"], finish_reason=finish, message=message))
        assert rollout["reward"] == pytest.approx(outcome.reward, abs=1e-9)
        assert {name: rollout["metrics"][name] for name in outcome.components} == outcome.components
        assert rollout["answer"] == task.data["accept"][0]
    if split == "train":
        assert {r["reward"] for r in rollouts} >= {1.0}
        assert len({r["reply"] for r in rollouts}) > 2


def test_the_train_client_of_v1_gets_the_tokens_that_were_sampled(played, model):
    renderer = ChatRenderer(str(model))
    tasks = {task.id: task for task in load_environment(**ARGS).tasks("train")}
    for rollout in played["v1"]["train"]:
        prompt = renderer.render(tasks[rollout["task_id"]].messages).ids
        assert rollout["token_ids"][: len(prompt)] == prompt
        assert not any(rollout["sampled"][: len(prompt)])
        sampled = sum(rollout["sampled"])
        assert sampled > 0
        logprobs = [
            value for value, mine in zip(rollout["logprobs"], rollout["sampled"], strict=True) if mine
        ]
        assert len(logprobs) == sampled
        assert all(value <= 0.0 for value in logprobs)
        assert any(value < 0.0 for value in logprobs)


def test_both_versions_ask_the_same_questions(played):
    for split in ("train", "eval"):
        v0, v1 = ({r["task_id"] for r in played[version][split]} for version in VERSIONS)
        assert v0 == v1


def test_v0_loads_by_its_hub_name(pythons, tmp_path):
    line = (
        "from verifiers import load_environment; env = load_environment('harleycooper/dakota1890');"
        "print(type(env).__name__, len(env.get_dataset()), len(env.get_eval_dataset()))"
    )
    name, train, held_out = run(pythons["v0"], "-c", line, HOME=str(tmp_path)).split()[-3:]
    assert (name, train) == ("SingleTurnEnv", "2000")
    assert int(held_out) == len(load_environment().tasks("eval"))


@pytest.mark.parametrize(
    ("version", "other", "use"), [("v0", "v1", "DakotaTaskset"), ("v1", "v0", "load_environment()")]
)
def test_the_wrong_verifiers_is_named(pythons, tmp_path, version, other, use):
    line = f"import dakota1890\ntry:\n    dakota1890.{use}\nexcept Exception as error:\n    print(error)"
    said = run(pythons[version], "-c", line, HOME=str(tmp_path))
    assert re.search(rf"\b{other}\b.*verifiers 0\..*verifiers>=0\.", said, re.S), said
