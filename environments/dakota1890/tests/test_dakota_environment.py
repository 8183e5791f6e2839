"""The environment behind Buckeye's protocol, its demonstrations, and its command."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.mcp.environment.scripted import Scripted

from buckeye.envs.base import Environment
from buckeye.errors import UsageError
from buckeye.evaluation.env_check import CheckOptions, check_environment
from dakota1890.__main__ import main
from dakota1890.environment import load_environment
from dakota1890.grading import grade


def play(environment, task, text, finish_reason="stop"):
    return asyncio.run(environment.rollout(task, Scripted((finish_reason, text))))


@pytest.fixture(scope="module")
def environment():
    return load_environment(num_train=200)


def test_environment_implements_the_protocol(environment, refusal):
    assert isinstance(environment, Environment)
    assert environment.name == "dakota1890"
    assert len(environment.tasks("train")) == 200
    with refusal(KeyError):
        environment.tasks("test")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_accepted_answer_has_full_reward(environment, split):
    for task in environment.tasks(split)[:100]:
        outcome = play(environment, task, f"<answer>{task.data['accept'][0]}</answer>")
        assert (outcome.reward, outcome.error, outcome.stop_reason) == (1.0, None, "answered")
        assert set(outcome.components) == {"exact", "ortho_miss", "sim", "format_ok", "truncated"}


def test_shaping_is_for_training_only_and_can_be_turned_off(environment):
    def near(env, split):
        task = next(
            t for t in env.tasks(split) if t.data["family"] == "possess" and len(t.data["accept"][0]) > 8
        )
        return play(env, task, f"<answer>{task.data['accept'][0]}k</answer>").reward

    assert 0.0 < near(environment, "train") <= 0.2
    assert near(environment, "eval") == 0.0
    assert near(load_environment(num_train=200, shaping=False), "train") == 0.0


def test_truncated_reply_scores_zero_with_stop_reason(environment):
    outcome = play(environment, environment.tasks("train")[0], "Well, the", "length")
    assert (outcome.reward, outcome.stop_reason, outcome.components["truncated"]) == (0.0, "truncated", 1.0)


def test_each_axis_is_a_split_and_eval_is_all_of_them(environment):
    axes = [split for split in environment.splits if split not in ("train", "eval")]
    assert axes == ["random", "lemma", "cell", "rule", "range", "exception"]
    assert sum(len(environment.tasks(axis)) for axis in axes) == len(environment.tasks("eval"))
    for axis in axes:
        assert {task.data["split"] for task in environment.tasks(axis)} == {axis}


def test_it_offers_probes_and_a_lexicon(environment):
    assert len(environment.probes()) > 200
    assert "kaška" in environment.lexicon()
    assert len(environment.content_hash) == 64


def test_families_can_be_chosen(environment):
    chosen = load_environment(families=["numerals"], num_train=50, num_eval=7)
    assert {task.data["family"] for task in (*chosen.tasks("train"), *chosen.tasks("eval"))} == {"numerals"}
    assert len(chosen.tasks("eval")) == 7
    assert list(chosen.tasks("eval")) == list(load_environment(families=["numerals"]).tasks("eval"))[:7]


_LINES = (Path(__file__).parent / "wrong_arguments.jsonl").read_text("utf-8").splitlines()
WRONG = [json.loads(line) for line in _LINES]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_arguments_are_explained(arguments, refusal):
    with refusal(UsageError):
        load_environment(**arguments)


@pytest.mark.parametrize("chosen", [{"families": ["exceptions"]}, {"families": ["numerals"], "depths": [4]}])
def test_eval_only_families_have_no_train_split(chosen, refusal):
    environment = load_environment(**chosen)
    assert environment.splits[0] == "eval"
    assert "train" not in environment.splits
    assert len(environment.tasks("eval")) > 5
    with refusal(KeyError):
        environment.tasks("train")
    with refusal(UsageError):
        environment.demonstrations()


def test_eval_only_families_combine_with_trained_ones():
    environment = load_environment(families=["exceptions", "conjugate"], num_train=30)
    assert {task.data["family"] for task in environment.tasks("train")} == {"conjugate"}
    assert {task.data["family"] for task in environment.tasks("eval")} == {"exceptions", "conjugate"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "families", [["exceptions"], ["exceptions", "conjugate"]], ids=["nothing trained", "one family trained"]
)
def test_env_check_accepts_eval_only_families(families):
    arguments = {"families": families, "num_train": 300}
    report = asyncio.run(check_environment("dakota1890", arguments, CheckOptions(sample=34, limit=0.1)))
    assert {c.name: c.detail for c in report.checks if c.status in ("error", "warning")} == {}
    constant = {s.split for s in report.scores if s.policy == "one string always"}
    assert ("exception" in constant) == ("train" in report.sizes) == (len(families) > 1)


def test_demonstrations_end_in_a_right_answer_and_are_for_training_only(environment, refusal):
    chats = environment.demonstrations("train")
    assert len(chats) == 200
    for chat, task in zip(chats, environment.tasks("train"), strict=True):
        assert [message["role"] for message in chat] == ["user", "assistant"]
        assert grade(chat[-1]["content"], task.data, shaping=False).reward == 1.0
    with refusal(UsageError):
        environment.demonstrations("eval")


def test_the_command_writes_chats(tmp_path, capsys):
    out = tmp_path / "chats.jsonl"
    command = ["demonstrations", str(out), "--count", "60", "--families", "conjugate,numerals"]
    assert main([*command, "--seed", "3", "--invented", "--hints", "none"]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == 60
    assert all(list(row) == ["messages"] for row in rows)
    assert not any("Rule:" in row["messages"][0]["content"] for row in rows)
    assert any("invented" in row["messages"][0]["content"] for row in rows)
    assert "60 demonstrations" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra",
    [
        ["--split", "eval"],
        ["--families", "verbs"],
        ["--families", "exceptions"],
        ["--depths", "5"],
        ["--invented-fraction", "2"],
    ],
)
def test_command_refuses_wrong_arguments(tmp_path, capsys, extra):
    assert main(["demonstrations", str(tmp_path / "x.jsonl"), "--count", "5", *extra]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "x.jsonl").exists()


def test_non_numeric_depths_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demonstrations", str(tmp_path / "x.jsonl"), "--count", "5", "--depths", "1,x"])
    assert ended.value.code == 2
    assert "--depths" in capsys.readouterr().err
