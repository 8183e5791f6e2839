"""Programs and functions as agents over HTTP, with a scripted policy."""

import asyncio
import json
import os
import tomllib
from itertools import islice
from pathlib import Path

import psutil
import pytest
from tests.orchestrator.fakes import make_runner
from tests.places import ROOT
from tests.waiting import wait_for
from tests.workers.adapters.scripted import Speaker
from tests.workers.workers.conftest import is_gone

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import UsageError
from buckeye.inference.client import Generation
from buckeye.orchestrator.batch import advantages_of, make_batch
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.task_sampler import GroupTask
from buckeye.workers.loading import open_environment
from buckeye.workers.proxy import serve
from buckeye.workers.worker_side.adapters import AdapterError, load

PACKAGES = Path(__file__).resolve().parent / "packages"
PROGRAM = """
import json, os, subprocess, sys, time, urllib.request

task = json.load(open(os.environ["BUCKEYE_TASK"]))
mode = os.environ.get("MODE", "")
if mode == "status":
    sys.exit("going down")
if mode == "children":
    child = subprocess.Popen(["sleep", "100"])
    with open("pids", "w") as file:
        print(os.getpid(), child.pid, file=file)
    time.sleep(100)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": os.environ["BUCKEYE_MODEL"], "messages": task["messages"]}).encode()
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(address, body, headers)))
text = answer["choices"][0]["message"]["content"]
result = {"reward": float(text == task["data"]["answer"]), "components": {"letters": len(text)}}
if mode == "file":
    json.dump(result, open(os.environ["BUCKEYE_RESULT"], "w"))
elif mode == "separators":
    print("said", json.dumps({**result, "stop_reason": "a\\u2028b\\x85c"}, ensure_ascii=False), sep="\\n")
elif mode != "nothing":
    print("said", text)
    print(json.dumps(result))
"""
FUNCTIONS = """
from __future__ import annotations
import asyncio, json, urllib.request
from dataclasses import dataclass

@dataclass
class Judged:
    length: int

async def slow(task, endpoint):
    await asyncio.sleep(100)

async def nothing_to_do(task, endpoint):
    return 0.75

def passes_on(task, endpoint):
    return nothing_to_do(task, endpoint)

def broken(task, endpoint):
    raise RuntimeError("the agent fell over")

def not_a_number(task, endpoint):
    return float("nan")

def echo(task, endpoint):
    return {"base_url": endpoint["base_url"], "id": task["id"]}

def judge(task, result):
    said = result["stdout"] if "stdout" in result else result["id"]
    return {"reward": 0.25, "components": vars(Judged(len(said))), "stop_reason": "judged"}

def no_judge(task, result):
    raise ValueError("the judge fell over")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    rows = [
        '{"id": "a", "prompt": "say 2", "answer": "2"}',
        "",
        '{"prompt": "say 3", "data": {"answer": "3"}}',
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the adapters change it
    return tmp_path


def rollouts(args, say=lambda *_: "2", *, tasks=2, deadline=60.0):
    """Return the outcomes of the first tasks, and the messages that the policy received."""
    adapter = load("agent", {"tasks": "tasks.jsonl", **args}, {})
    speaker = Speaker(say)

    async def play():
        outcomes = []
        for task in islice(adapter.tasks("train"), tasks):
            async with serve(speaker) as endpoint:
                names = ("base_url", "root_url", "api_key", "model")
                values = {name: getattr(endpoint, name) for name in names} | {"sampling": {}}
                outcomes.append(await adapter.rollout(task, values, {"deadline": deadline}))
        await adapter.close()
        return outcomes

    return asyncio.run(play()), speaker


def program(**env):
    return {"command": ["python", "program.py"], "env": env}


@pytest.mark.parametrize("mode", ["", "file", "separators"])
def test_program_reports_its_reward(folder, mode):
    outcomes, speaker = rollouts(program(MODE=mode))
    assert [outcome["reward"] for outcome in outcomes] == [1.0, 0.0]
    assert [outcome["components"] for outcome in outcomes] == [{"letters": 1}, {"letters": 1}]
    assert [heard[0]["content"] for heard in speaker.heard] == ["say 2", "say 3"]


def test_reward_function_scores_a_program(folder):
    outcomes, _ = rollouts({**program(), "reward": "functions:judge"})
    printed = 'said 2\n{"reward": 1.0, "components": {"letters": 1}}\n'
    assert outcomes[0]["components"] == {"length": len(printed)}
    assert (outcomes[0]["reward"], outcomes[0]["stop_reason"]) == (0.25, "judged")


@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        ("status", "ExitStatus", "exited with status 1; last output:\ngoing down"),
        ("nothing", "NoReward", "(no output)"),
    ],
)
def test_a_program_that_fails_is_an_error_with_its_last_lines(folder, mode, kind, said):
    (outcome, _), _ = rollouts(program(MODE=mode))
    assert outcome["reward"] is None
    assert (outcome["error"]["boundary"], outcome["error"]["type"]) == ("agent", kind)
    assert said in outcome["error"]["message"]


@pytest.mark.parametrize(
    ("args", "limits"),
    [(program(MODE="children"), {"deadline": 0.5}), ({"callable": "functions:slow", "timeout": 0.1}, {})],
)
def test_agent_timeout_is_an_error(folder, args, limits):
    (outcome, *_), _ = rollouts(args, **limits)
    assert (outcome["error"]["boundary"], outcome["error"]["type"]) == ("agent", "Timeout")
    assert "did not end within 0.5 s" in outcome["error"]["message"] or not limits


def test_all_its_processes_end_with_a_cancelled_rollout(folder):
    adapter = load("agent", {"tasks": "tasks.jsonl", **program(MODE="children")}, {})
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "root_url": "http://127.0.0.1:9", "sampling": {}}
    (task, _), pids = adapter.tasks("train"), folder / "pids"

    async def play():
        values = {**endpoint, "api_key": "none", "model": "none"}
        playing = asyncio.ensure_future(adapter.rollout(task, values, {"deadline": 100.0}))
        while not (pids.exists() and pids.read_text().endswith("\n")):
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.02)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await adapter.close()

    asyncio.run(asyncio.wait_for(play(), 60))
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: is_gone(pid), f"the end of process {pid}")


def test_functions_are_agents(folder):
    outcomes, _ = rollouts({"callable": "functions:nothing_to_do"})
    assert [outcome["reward"] for outcome in outcomes] == [0.75, 0.75]
    outcomes, _ = rollouts({"callable": "functions:passes_on"})  # a plain function that returns a coroutine
    assert [outcome["reward"] for outcome in outcomes] == [0.75, 0.75]
    (folder / "never_a_module.py").write_text(FUNCTIONS)
    outcomes, _ = rollouts({"callable": "never_a_module.py:echo", "reward": "functions:judge"})
    assert [outcome["components"]["length"] for outcome in outcomes] == [1, 1]  # the ids "a" and "3"


@pytest.mark.parametrize(
    ("args", "boundary", "message"),
    [
        ({"command": ["no-such-program"]}, "agent", "no-such-program"),
        ({"callable": "functions:broken"}, "agent", "the agent fell over"),
        ({"callable": "functions:not_a_number"}, "score", "the reward is nan, which is not finite"),
        ({"callable": "functions:echo"}, "score", "the reward is None, not a number (functions.py:"),
        ({"callable": "functions:echo", "reward": "functions:no_judge"}, "score", "the judge fell over"),
    ],
)
def test_agents_that_fail(folder, args, boundary, message):
    (outcome, _), _ = rollouts(args)
    assert (outcome["reward"], outcome["error"]["boundary"]) == (None, boundary)
    assert message in outcome["error"]["message"]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"command": ["a"], "callable": "a:b"},
        {"command": "python a.py"},
        {"comand": ["a"]},
        {"callable": "functions"},
        {"callable": "functions:absent"},
        {"callable": "nowhere:absent"},
        {"command": ["a"], "tasks": "absent.jsonl"},
        {"command": ["a"], "cwd": "absent"},
        {"command": ["a"], "env": {"N": 1}},
    ],
)
def test_wrong_arguments(folder, args, refusal):
    with refusal(AdapterError):
        load("agent", {"tasks": "tasks.jsonl", **args}, {})


def test_wrong_argument_of_a_worker_is_named_with_the_known_ones(refusal):
    with refusal(UsageError):
        open_environment("agent", {"comand": ["a"]}, WorkerSettings())


@pytest.mark.parametrize(
    "row",
    [
        "{",
        '"text"',
        '{"id": "b"}',
        '{"prompt": "a", "messages": []}',
        '{"messages": [{"content": "a"}]}',
        '{"prompt": 3}',
        '{"prompt": "a", "data": 3}',
        '{"prompt": "a", "id": "first"}',
    ],
)
def test_wrong_tasks_are_named_by_their_line(folder, row, refusal):
    (folder / "tasks.jsonl").write_text(json.dumps({"id": "first", "prompt": "a"}) + "\n" + row)
    with refusal(AdapterError):
        load("agent", {"command": ["a"], "tasks": "tasks.jsonl"}, {})


def test_the_example_plays_its_own_tasks(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    args = tomllib.loads((ROOT / "examples/agent/orch.toml").read_text())["env"][0]["args"]
    tasks = [json.loads(line) for line in (ROOT / "examples/agent/tasks.jsonl").read_text().splitlines()]
    assert len(tasks) == 64
    assert (tasks[0]["prompt"], tasks[0]["answer"]) == ("1 + 1 = ?", 2)
    replies = {0: "2", 1: "Sum: 2", 2: "Sum: 9", 3: "9", 4: "9"}  # told once, wrong, never
    outcomes, speaker = rollouts(args, lambda _, __, turn: replies[turn], tasks=3)
    assert [outcome["reward"] for outcome in outcomes] == [1.0, 0.2, 0.0]
    assert [len(heard) for heard in speaker.heard] == [1, 3, 1, 1, 3]


def test_leaked_child_of_a_program_does_not_delay_its_rollout(folder):
    (folder / "leaves.py").write_text(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "print('{\"reward\": 0.5}')\n"
    )
    try:
        (outcome,), _ = rollouts({"command": ["python", "leaves.py"]}, tasks=1)
    finally:
        psutil.Process(int((folder / "pid").read_text())).kill()
    assert (outcome["reward"], outcome["error"]) == (0.5, None)


class LastWord:
    """Engine that replies to the last word of the prompt with a letter: `q`, `n`: x; `sum`: s; else y."""

    async def generate(self, prompt_ids, params):
        word = "".join(map(chr, prompt_ids)).split(":")[-2].partition("$")[0]
        ids = [ord({"q": "x", "n": "x", "sum": "s"}.get(word, "y")), ord("$")]
        return Generation(token_ids=ids, logprobs=[-0.5] * 2, versions=[3] * 2, finish_reason="stop")


@pytest.mark.anyio
async def test_a_rollout_that_compacts_and_branches_trains_each_token_once(tmp_path):
    """Samples: up to each of two summaries, after them, of a sub-agent, of a second continuation.

    One token per character; a reply has two. u:q$a:x$ (8) + u:n$a:x$ (8) + u:sum$a:s$ (10) are 26 tokens with
    6 sampled, and so are u:s$a:y$ + u:n$a:x$ + u:sum$a:s$. u:s$a:y$ has 8, u:sub$a:y$ has 10, and
    u:q$a:x$u:m$a:y$ has 16, with 2 sampled: its x$ is trained in the first sample.
    """
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "prompt": "q"}\n')
    args = {"command": ["python", str(PACKAGES / "compacting.py")], "cwd": str(tmp_path)}
    args["tasks"] = str(tmp_path / "tasks.jsonl")
    environment = open_environment("agent", args, WorkerSettings())
    named = NamedEnvironment(name="agent", environment=environment)
    task = GroupTask(index=0, env=named, task=environment.tasks("train")[0])
    try:
        group = await make_runner(LastWord(), seq_len=200).start_group(task, 2)
    finally:
        await environment.close()
    config = OrchestratorConfig()
    samples = make_batch(3, [group], advantages_of([group], config), config, state={}).samples
    assert sorted(group.rewards) == [0.0, 1.0]
    assert [(rollout.turns, rollout.turns_branched) for rollout in group.scored] == [(9, 4), (9, 4)]
    lengths = [(len(sample.token_ids), int(sample.loss_mask.sum())) for sample in samples]
    assert lengths == 2 * [(26, 6), (26, 6), (8, 2), (10, 2), (16, 2)]
    trained = ["".join(map(chr, sample.token_ids[sample.loss_mask])) for sample in samples]
    assert trained == 2 * ["x$x$s$", "y$x$s$", "y$", "y$", "y$"]
    for sample, reward in zip(samples, [group.rewards[0]] * 5 + [group.rewards[1]] * 5, strict=True):
        assert set(sample.advantages[sample.loss_mask]) == {reward - 0.5}
        assert set(sample.versions[sample.loss_mask]) == {3}
        assert not sample.advantages[~sample.loss_mask].any()
