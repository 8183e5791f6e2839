"""Published environments of several libraries, with random replies: rewards equal those of the library.

Each library is in a separate interpreter with a pinned version.
"""

import itertools
import json
import random
import sqlite3

import pytest
from tests.workers.adapters.scripted import opened, play
from tests.workers.adapters.test_played import own_scores
from tests.workers.adapters.venvs import python_of

pytestmark = pytest.mark.slow


def assert_only_extended(speaker):
    """Assert that every request extends the one before it."""
    for earlier, later in itertools.pairwise(speaker.heard):
        assert later[: len(earlier)] == earlier


def chosen(words, seed=0):
    """Return a policy that replies with random texts."""
    generator = random.Random(seed)
    return lambda *_: generator.choice(words)


GYMNASIUM = {
    "FrozenLake-v1": ("left down right up", {"map_name": "8x8"}),
    "Taxi-v4": ("south north east west pickup dropoff", {"is_rainy": True}),
    "Blackjack-v1": ("stick hit", {"natural": True, "sab": False}),
    "CliffWalking-v1": ("up right down left", {"max_steps": 40}),
    "CartPole-v1": ("0 1", {}),
}


@pytest.mark.parametrize("name", GYMNASIUM)
def test_gymnasium(name):
    """A reply without an action costs 1, and does not reach the environment."""
    python, (names, args) = python_of("gymnasium"), GYMNASIUM[name]
    words = [*names.split(), *(f"Then {word.upper()}." for word in names.split()), "hm"]
    played = play(opened(f"gymnasium/{name}", python, args), chosen(words), tasks=20)
    settings = {"max_episode_steps" if key == "max_steps" else key: value for key, value in args.items()}
    replies = [[message["content"] for message in speaker.said] for _, speaker, _ in played]
    actions = [[text.lower().strip(".").split()[-1] for text in said] for said in replies]
    job = [
        {
            "seed": task.data["seed"],
            "settings": settings,
            "actions": [names.split().index(word) for word in said if word != "hm"],
        }
        for (task, _, _), said in zip(played, actions, strict=True)
    ]
    assert sum(map(len, replies)) >= 20
    own = own_scores(python, "gymnasium_scores.py", name, job=job)
    for (_, speaker, outcome), said, scores in zip(played, actions, own, strict=True):
        assert outcome.error is None
        remaining = iter(scores)
        expected = [-1.0 if word == "hm" else next(remaining) for word in said]
        assert list(outcome.turn_rewards) == expected
        assert outcome.reward == pytest.approx(sum(expected))
        assert next(remaining, None) is None
        assert_only_extended(speaker)


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
