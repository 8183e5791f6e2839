"""Published environments of several libraries, with random replies: rewards equal those of the library.

Each library is in a separate interpreter with a pinned version.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter

import pytest
from benchmarks.ecosystems import environment_of, parity, table_rows
from tests.workers.adapters.scripted import Speaker, call, multiplier, opened, play
from tests.workers.adapters.test_played import PACKAGES, own_scores
from tests.workers.adapters.venvs import python_of

from buckeye.errors import InferenceError, UsageError
from buckeye.evaluation.checks.samples import sample_splits
from buckeye.evaluation.checks.task_checks import check_splits_disjoint

pytestmark = pytest.mark.slow


def assert_only_extended(speaker):
    """Assert that every request extends the one before it."""
    for earlier, later in itertools.pairwise(speaker.heard):
        assert later[: len(earlier)] == earlier


def chosen(words, seed=0):
    """Return a policy that replies with random texts."""
    generator = random.Random(seed)
    return lambda *_: generator.choice(words)


ROWS = table_rows()
ECOSYSTEMS = ("gymnasium", "inspect-ai", "ors-sdk", "openreward", "hud")
COMPARED = [name for name, row in ROWS.items() if row["ecosystem"] in ECOSYSTEMS]


@pytest.mark.parametrize(
    "name", [*COMPARED, "bfcl-eval/simple_java", "tool_v1", "mini-swe-agent", "agent of openai-agents"]
)
def test_rewards_are_those_of_the_library(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)  # programs of the library are in its interpreter
    compared = parity(ROWS[name], environment_of(ROWS[name], tmp_path / "tasks.jsonl"))
    assert (compared["differ"], compared["errors"], compared["equal"]) == ([], 0, 50)


def sql_database(folder):
    """Make the database that a task of `text2sql` names."""
    home = folder / "spider" / "database" / "shop"
    home.mkdir(parents=True)
    with sqlite3.connect(home / "shop.sqlite") as database:
        database.execute("create table items (name text, price int)")
        database.executemany("insert into items values (?, ?)", [("pen", 2), ("ink", 5)])


def skyrl_rows(name):
    if name == "text2sql":
        truth = "select name from items where price > 3"
        return [{"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": truth}}] * 10
    if name == "lcb":
        tests = json.dumps([{"input": "3", "output": "6", "testtype": "stdin"}])
        return [{"reward_spec": {"ground_truth": tests}}] * 10
    field = "reward_model" if name == "aime" else "reward_spec"
    return [{field: {"ground_truth": str(number % 3)}, "extra_info": {}} for number in range(10)]


THINK = "<think>a</think>"
SKYRL = {
    "gsm8k": ["#### 1", "It is\n#### 2", "1", "#### 0,", "none", "#### 1 #### 2"],
    "gsm8k_multi_turn": ["#### 1", "so\n#### 2", "1", "none"],
    "aime": ["Answer: 1", "Answer: $2$", "Answer: \\boxed{0}", "1", ""],
    "text2sql": [
        f"{THINK}<sql>select price from items where price > 3</sql>",
        f"{THINK}<sql>select nothing</sql>",
        f"{THINK}<solution>select name from items where price > 3</solution>",
        f"{THINK}<solution>select name from items</solution>",
        "none",
    ],
    "lcb": ["```python\nprint(2 * int(input()))\n```", "```python\nprint(int(input()))\n```", "print(6)"],
}


@pytest.mark.parametrize("name", SKYRL)
def test_skyrl_gym(name, tmp_path):
    python, config = python_of("skyrl-gym"), {"db_path": str(tmp_path)}
    sql_database(tmp_path)
    prompt = [{"role": "user", "content": "A question"}]
    rows = [{"prompt": prompt, **row} for row in skyrl_rows(name)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"tasks": str(tmp_path / "rows.jsonl"), "env_config": config}
    rewards = []
    for seed in range(3):
        played = play(opened(f"skyrl-gym/{name}", python, args), chosen(SKYRL[name], seed), tasks=10)
        job = [
            {"config": config, "row": row, "said": [message["content"] for message in speaker.said]}
            for row, (_, speaker, _) in zip(rows, played, strict=True)
        ]
        own = own_scores(python, "skyrl_gym_scores.py", name, job=job)
        for (_, speaker, outcome), steps in zip(played, own, strict=True):
            assert outcome.error is None
            assert list(outcome.turn_rewards) == [reward for reward, _ in steps]
            told = [[message["content"] for message in heard[-1:]] for heard in speaker.heard[1:]]
            assert told == [observations for _, observations in steps][: len(told)]
            assert_only_extended(speaker)
            rewards.append(outcome.reward)
    assert len(set(rewards)) > 1


def test_inspect_ai_splits_scores_and_limits():
    python, file = python_of("inspect-ai"), f"inspect-ai/{PACKAGES}/inspect_tasks.py"
    args = {"count": 3, "eval": {"first": 3}, "limit": 2, "score": "includes"}
    environment = opened(f"{file}@sums", python, args)
    assert [len(environment.tasks(split)) for split in environment.splits] == [2, 2]
    ((task, _, outcome),) = play(environment, lambda *_: "6 or 7", split="eval", tasks=1)
    assert (task.data["answer"], outcome.reward) == ("6", 1.0)
    assert outcome.components == {"match": 0.0, "includes": 1.0}
    tool_first = opened(f"{file}@products", python, max_turns=1)
    ((_, speaker, outcome),) = play(tool_first, multiplier, tasks=1)
    assert (outcome.reward, outcome.stop_reason, len(speaker.said)) == (0.0, "max_turns", 1)


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("boxed", {}, "needs a sandbox"),
        ("sum", {}, "not found"),
    ],
)
def test_inspect_ai_refuses_what_it_cannot_run(name, args, told):
    spec = f"inspect-ai/{PACKAGES}/inspect_tasks.py{name and f'@{name}'}"
    with pytest.raises(UsageError) as refused:
        opened(spec, python_of("inspect-ai"), args).tasks("train")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "say", "boundary", "told"),
    [
        ("graded", lambda *_: "1", "score", "set `grader`"),
        ("products", lambda *_: call("multiply", {"a": 101, "b": 1}), "step", "too large"),
    ],
)
def test_inspect_ai_errors_have_no_reward(name, say, boundary, told):
    environment = opened(f"inspect-ai/{PACKAGES}/inspect_tasks.py@{name}", python_of("inspect-ai"))
    ((_, _, outcome),) = play(environment, say, tasks=1)
    assert (outcome.reward, outcome.boundary) == (None, boundary)
    assert told in outcome.error


@pytest.fixture
def echo(tmp_path):
    """Project that `openenv init` makes: the environment `echo`."""
    package = python_of("openenv").parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    template = package / "site-packages" / "openenv" / "cli" / "templates" / "openenv_env"
    shutil.copytree(template, tmp_path / "echo")
    names = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}
    for path in (tmp_path / "echo").rglob("*.py"):
        text = path.read_text()
        for old, new in names.items():
            text = text.replace(old, new)
        path.with_name(path.name.replace("__ENV_NAME__", "echo")).write_text(text)
    return tmp_path / "echo"


OPENENV = {
    "count": ["abc", "aBC", "ABC", "", "ab"],
    "sums": [*(f'{{"first": {n}, "second": 1}}' for n in range(9)), "none", "{}", '{"first": "x"}'],
    "echo": ["a", "a longer text", ""],
}


@pytest.mark.parametrize("name", OPENENV)
def test_openenv(name, echo):
    """The server of `echo` has room for one session, so that its rollouts wait for each other."""
    python = python_of("openenv")
    app, folder = ("server.app:app", echo) if name == "echo" else (f"openenv_games:{name}", PACKAGES)
    args = {"folder": str(folder), "max_steps": 6, "reset": {"unit": 2}, "seed": 20}
    played = play(opened(f"openenv/{app}", python, args), chosen(OPENENV[name]), tasks=20)
    job = [
        {
            "options": {"seed": task.data["seed"], "unit": 2},
            "said": [message["content"] for message in speaker.said],
        }
        for task, speaker, _ in played
    ]
    field = {"count": "text", "sums": None, "echo": "message"}[name]
    own = own_scores(python, "openenv_scores.py", folder, app, field, job=job)
    for (_, speaker, outcome), rewards in zip(played, own, strict=True):
        assert outcome.error is None, outcome.error
        assert list(outcome.turn_rewards) == pytest.approx([reward or 0.0 for reward in rewards])
        assert_only_extended(speaker)
    assert sum(len(speaker.said) for _, speaker, _ in played) >= 40


def test_openenv_errors_have_no_reward():
    python, args = python_of("openenv"), {"folder": str(PACKAGES), "seed": 12}
    said = {12: "fall", 13: "abc"}
    played = play(opened("openenv/openenv_games:count", python, args), lambda *_: said[12], tasks=2)
    assert [(outcome.reward, outcome.boundary) for _, _, outcome in played] == [
        (None, "step"),
        (None, "reset"),
    ]
    assert "the game fell over" in played[0][2].error
    assert "no game 13" in played[1][2].error


@pytest.fixture
def server(request):
    """Server of four slots, which pings its clients every half second and ends silent connections.

    The parameter is another number of seconds.
    """
    seconds = str(getattr(request, "param", 0.5))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--port", str(port), "--ws-ping-interval", seconds, "--ws-ping-timeout", seconds)
    command = [
        python_of("openenv"),
        "-m",
        "uvicorn",
        "openenv_games:four_slots",
        "--log-level",
        "error",
        *options,
    ]
    process = subprocess.Popen(command, cwd=PACKAGES)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            break
        time.sleep(0.1)
    yield url
    process.kill()
    process.wait()


def free_slots(url):
    """Return how many of eight new sessions the server accepts at the same time."""
    code = (
        "import json, sys\nfrom websockets.sync.client import connect\n"
        "sessions = [connect(sys.argv[1]) for _ in range(8)]\n"
        'for s in sessions[:4]: s.send(\'{"type": "reset", "data": {}}\')\n'
        "print(sum(json.loads(s.recv())['type'] == 'observation' for s in sessions[:4]))"
    )
    words = [python_of("openenv"), "-c", code, f"ws{url.removeprefix('http')}/ws"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


class Leaving(Speaker):
    """Policy that replies, makes the game fail, fails itself, or never replies."""

    async def chat(self, messages, *, tools=()):
        reply = await super().chat(messages, tools=tools)
        if reply.text == "raise":
            raise InferenceError("the engine is gone")
        if reply.text == "wait":
            await asyncio.sleep(1000)
        return reply


def test_openenv_sessions_end_with_their_rollouts(server):
    """A thousand rollouts that end in five ways leave all four slots free."""
    environment = opened("openenv/count", python_of("openenv"), {"url": server, "seed": 20}, max_turns=2)
    says = [lambda *_, text=text: text for text in ("abc", "fall", "raise", "wait", "ABC")]
    outcomes = []

    async def run_all():
        tasks, places = environment.tasks("train"), asyncio.Semaphore(16)

        async def one(index):
            async with places:
                rollout = environment.rollout(tasks[index], Leaving(says[index % 5]))
                try:
                    outcomes.append(await asyncio.wait_for(rollout, 3.0 if index % 5 == 3 else None))
                except TimeoutError:
                    outcomes.append(None)

        await asyncio.gather(*(one(index) for index in range(1000)))
        await environment.close()

    asyncio.run(run_all())
    assert outcomes.count(None) == 200
    finished = [outcome for outcome in outcomes if outcome is not None]
    assert sum(outcome.reward is not None for outcome in finished) == 400
    assert Counter(outcome.boundary for outcome in finished if outcome.error) == {"step": 200, "model": 200}
    assert free_slots(server) == 4


class Thinking(Speaker):
    def __init__(self, say, seconds):
        super().__init__(say)
        self.seconds = seconds

    async def chat(self, messages, *, tools=()):
        await asyncio.sleep(self.seconds if not self.said else 0.0)
        return await super().chat(messages, tools=tools)


@pytest.mark.parametrize(("server", "seconds"), [(0.5, 4.0), (20.0, 120.0)], indirect=["server"])
def test_openenv_session_survives_a_reply_of_several_ping_intervals(server, seconds):
    """Twenty seconds are the default of uvicorn."""
    environment = opened("openenv/count", python_of("openenv"), {"url": server, "seed": 20})

    async def run():
        try:
            return await environment.rollout(
                environment.tasks("train")[0], Thinking(lambda *_: "abc", seconds)
            )
        finally:
            await environment.close()

    outcome = asyncio.run(run())
    assert (outcome.reward, outcome.error) == (3.0, None)


def hint_and_guess(messages, tools, turn):
    return call("hint", {}, turn) if turn == 0 else call("guess", {"number": 9}, turn)


def test_ors():
    """A hint costs a tenth; the only right guess is 9, and the game of 10 does not start."""
    args = {"folder": str(PACKAGES), "train": "held out", "eval": "games", "limit": 2}
    environment = opened("ors-sdk/ors_games:Guess", python_of("ors-sdk"), args)
    (_, speaker, right), (_, _, broken) = play(environment, hint_and_guess, tasks=2)
    assert (right.reward, right.stop_reason) == (pytest.approx(0.9), "done")
    assert [message["content"] for message in speaker.heard[1] if message["role"] == "tool"] == ["odd"]
    assert (broken.reward, broken.boundary) == (None, "reset")
    for say, reward, reason in ((hint_and_guess, -0.1, "done"), (lambda *_: "9", 0.0, "no_call")):
        environment = opened("ors-sdk/ors_games:Guess", python_of("ors-sdk"), args)
        ((_, _, outcome),) = play(environment, say, split="eval", tasks=1)
        assert (outcome.reward, outcome.stop_reason) == (pytest.approx(reward), reason)


def test_openreward():
    """Two wooden hoes need sticks and planks; the text after the last call is graded."""
    made = [({"jungle_planks": 2}, "stick", 4), ({"acacia_log": 1}, "acacia_planks", 4)]
    made += [({"acacia_planks": 4, "stick": 4}, "wooden_hoe", 2)]
    craft = [{"ingredients": needs, "target": [item, count]} for needs, item, count in made]

    def act(messages, tools, turn):
        if "wooden_hoe" not in messages[0]["content"]:
            return "I made nothing."
        return call("craft", craft[turn], turn) if turn < len(craft) else "Two hoes."

    game = "openreward/platoon_textcraft.env:TextCraftEnvironment"
    environment = opened(game, python_of("openreward"), {"limit": 2})
    splits = sample_splits(environment, ["train", "eval"], per_family=2, seed=0)
    assert check_splits_disjoint(splits).status == "pass"
    played = play(environment, act, tasks=2)
    assert [(one.reward, one.stop_reason) for _, _, one in played] == [(0.0, "done"), (1.0, "done")]
    assert_only_extended(played[1][1])


def play_openreward_group(*says):
    environment = opened(
        "openreward/openreward_groups:Longest", python_of("openreward"), {"folder": str(PACKAGES)}
    )

    async def run():
        task = environment.tasks("train")[0]
        outcomes = [await environment.rollout_in_group(task, Speaker(say)) for say in says]
        assert all(outcome.pending for outcome in outcomes)
        finished = await environment.finish_group(task, outcomes)
        await environment.close()
        return finished

    return asyncio.run(run())


def test_openreward_scores_groups():
    """A note has 0.25 and 0.1 of the group, the word 1, the longest text 1; without a verdict, no reward."""

    def noted(messages, tools, turn):
        return call("note", {"text": "blue"}, turn) if turn < 2 else "sea"

    finished = play_openreward_group(noted, lambda *_: "the wide sea", lambda *_: "moon")
    assert [outcome.reward for outcome in finished] == pytest.approx([0.5 + 1 + 0.2, 1 + 1, 0])
    assert [outcome.components["group"] for outcome in finished] == pytest.approx([0.2, 1, 0])
    for outcome in play_openreward_group(lambda *_: "sea", lambda *_: "unclear"):
        assert (outcome.reward, outcome.boundary) == (None, "score")
        assert "no verdict" in outcome.error
    alone = opened("openreward/openreward_groups:Longest", python_of("openreward"), {"folder": str(PACKAGES)})
    ((_, _, outcome),) = play(alone, lambda *_: "sea", tasks=1)
    assert (outcome.reward, outcome.stop_reason) == (2.0, "done")


def test_bfcl():
    """A right call of the first task, a wrong one, and a text."""
    area = {"base": 10, "height": 5}
    said = [call("calculate_triangle_area", area), call("calculate_triangle_area", area | {"base": 1}), "25"]
    rewards = []
    for reply in said:
        environment = opened("bfcl-eval/simple_python", python_of("bfcl-eval"), {"limit": 1})
        rewards += [outcome.reward for _, _, outcome in play(environment, lambda *_, reply=reply: reply)]
    assert rewards == [1.0, 0.0, 0.0]


def multiply_or_count(messages, tools, turn):
    """Multiply with the tool if the prompt asks for a product, else reply with 3."""
    return multiplier(messages, tools, turn) if "times" in messages[0]["content"] else "3"


def test_hud(tmp_path):
    """2 times 7 is right, 3 times 7 is only brief; there are three letters in the first word."""
    environment = opened("hud/hud_games", python_of("hud"), {"folder": str(PACKAGES)})
    played = play(environment, multiply_or_count, tasks=5)
    assert [outcome.reward for _, _, outcome in played] == pytest.approx([1.0, 0.2, 1.0, 1.0, 0.0])
    assert played[0][2].components == {"right": 1.0, "brief": 1.0}
    assert_only_extended(played[0][1])

    rows = [{"env": "games", "id": "product", "args": {"number": number}} for number in (13, 11, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {"folder": str(PACKAGES), "tasks": str(tmp_path / "rows.jsonl"), "limit": 2}
    environment = opened("hud/hud_games", python_of("hud"), args)
    (_, _, broken), (_, _, ungraded) = play(environment, lambda *_: "", tasks=3)
    assert [(one.reward, one.boundary) for one in (broken, ungraded)] == [(None, "reset"), (None, "score")]

    rows = [{**rows[0], "runtime_config": {"image": "games"}}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(UsageError) as refused:
        opened("hud/hud_games", python_of("hud"), args)
    assert refused.value.code == "BK-ENV-LOAD"
