"""Rollouts on the page, from the index and single lines: always as plain text."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from buckeye.errors import UsageError
from buckeye.ui.rollouts import GroupAddress, RolloutAddress, group, groups
from buckeye.ui.rollouts import rollout as in_full
from buckeye.ui.run_catalog import OpenRun
from buckeye.ui.tokens import tokens
from tests.ui.made import HOSTILE, make_run, rollout


def test_groups_are_columns_with_the_newest_step_first(ask):
    told = ask("groups")
    assert told["left_out"] == 0
    assert told["step"] == [3, 3, 2, 2, 1, 1, 0, 0, 0]
    assert told["split"][-1] == "eval"
    assert told["group"][:3] == [6, 7, 4]
    assert told["task"][0] == "train-0"
    assert told["reward"][0] == 0.375
    assert sorted(map(float, told["rewards"][0].split(","))) == [0, 0.25, 0.5, 0.75]
    assert (told["rollouts"][0], told["errored"][0], told["truncated"][0]) == (4, 0, 1)


def test_a_group_has_its_answers_with_what_each_earned(ask):
    told = ask("group", step=1, group=2)
    assert [one["text"] for one in told["prompt"]] == ["Count.", "How many?"]
    assert [one["reward"] for one in told["rollouts"]] == [0, 0.25, 0.5, 0.75]
    assert told["rollouts"][3]["components"] == {"exact": 0.75, "brevity": 1.0}
    assert told["rollouts"][3]["explanations"] == {"exact": "3 of 4"}
    call, result, last = told["rollouts"][3]["messages"]
    assert call["calls"] == [{"name": "add", "arguments": '{"a": 1, "b": 2}'}]
    assert (result["role"], result["text"], last["text"]) == ("tool", "3", "It is 3.")
    assert told["rollouts"][2]["messages"][0]["reasoning"] == "one and two are three"


def test_a_rollout_of_an_evaluation_is_found_by_its_environment(ask):
    told = ask("rollout", split="eval", step=0, group=0, number=0, env="sums")
    assert told["messages"][-1]["text"] == "3"


def test_what_is_hostile_is_handed_on_as_it_is(ask, client):
    told = ask("rollout", step=0, group=0, number=1)
    assert told["messages"][-1]["text"] == HOSTILE
    answer = client.get("/api/runs/one/rollout", params={"step": 0, "group": 0, "number": 1})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("length", [200_001, 5_000_000])
def test_a_long_text_is_cut_in_its_middle(tmp_path, length):
    run = OpenRun("run", make_run(tmp_path / "run", steps=1, tokens=False, long=length))
    message = in_full(run, RolloutAddress(step=0, group=0, number=1))["messages"][-1]
    assert message["left_out"] == length - 200_000
    assert len(message["text"]) < 200_100
    glance = group(run, GroupAddress(step=0, group=0))["rollouts"][1]["messages"][0]
    assert len(glance["text"]) < 4_100


def test_messages_of_any_form_are_told(tmp_path):
    path = make_run(tmp_path / "run", steps=1, tokens=False)
    odd = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}, 3]},
        {"role": "assistant", "content": "<think>hm</think>yes", "tool_calls": [{"function": "x"}, 7]},
        {"role": "user", "content": {"text": "alone"}},
    ]
    line = {**rollout(0, 0), "messages": odd}
    (path / "rollouts" / "step_0.jsonl").write_text(json.dumps(line) + "\n")
    told = in_full(OpenRun("run", path), RolloutAddress(step=0, group=0, number=0))["messages"]
    assert told[0]["text"] == "look\n[image_url]\n3"
    assert (told[1]["reasoning"], told[1]["text"]) == ("hm", "yes")
    assert [call["name"] for call in told[1]["calls"]] == [""]
    assert told[2]["text"] == "alone"
    assert len(told) == 3


def test_texts_that_were_deleted_leave_their_figures(tmp_path):
    path = make_run(tmp_path / "run", steps=2, tokens=False)
    run = OpenRun("run", path)
    assert groups(run)["step"] == (1, 1, 0, 0, 0)
    (path / "rollouts" / "step_0.jsonl").unlink()
    (path / "evals" / "step_0" / "sums.jsonl").unlink()
    told = in_full(run, RolloutAddress(step=0, group=0, number=3))
    assert (told["reward"], told["text_unavailable"], told["messages"]) == (0.75, True, [])


def test_lines_that_are_no_rollouts_are_counted(tmp_path):
    path = make_run(tmp_path / "run", steps=1, tokens=False)
    with (path / "rollouts" / "step_0.jsonl").open("ab") as file:
        file.write(b'{"task_id": "\xff\xfe"}\n{"task_id": "\\ud800"}\n{"half')
    told = groups(OpenRun("run", path))
    assert (told["unreadable"], len(told["step"])) == (3, 3)


def test_texts_of_a_step_are_searched(ask):
    assert {one["number"] for one in ask("search", step=2, text="ARE THREE")["found"]} == {2}
    assert {one["number"] for one in ask("search", step=2, text="onerror")["found"]} == {1}
    assert len(ask("search", step=2, text="it is 3")["found"]) == 2
    assert ask("search", step=9, text="x") == {"found": [], "all": True}


def test_what_was_not_played_is_said(client, wording):
    for question, given in (
        ("rollout", {"step": 0, "group": 0, "number": 9}),
        ("group", {"step": 7, "group": 0}),
        ("tokens", {"step": 7, "group": 0, "number": 0}),
    ):
        answer = client.get(f"/api/runs/one/{question}", params=given)
        assert answer.status_code == 404
        assert answer.json()["error"] == wording


def test_tokens_have_what_is_recorded_of_each(tmp_path):
    path = make_run(tmp_path / "run", steps=1)
    bytewise = Tokenizer(models.BPE(vocab={chr(n): n for n in range(128)}, merges=[]))
    bytewise.decoder = decoders.Fuse()
    (path / "weights" / "step_1").mkdir(parents=True)
    bytewise.save(str(path / "weights" / "step_1" / "tokenizer.json"))
    told = tokens(OpenRun("run", path), RolloutAddress(step=0, group=1, number=2))
    (sample,) = told["samples"]
    assert told["missing"] is None
    assert sample["ids"] == [72, 105, 71, 66, 67]
    assert "".join(sample["texts"]) == "HiGBC"
    assert sample["trained"] == [False, False, True, True, True]
    assert sample["sampler_logprob"] == [None, None, -0.5, -0.5, -0.5]
    assert sample["trainer_logprob"] == [None, None, -0.75, -0.75, -0.75]
    np.testing.assert_allclose(sample["advantage"][2:], 0.125)
    assert sample["version"] == [None, None, 0, 0, 0]
    assert sample["turn"] == [-1, -1, 0, 0, 0]


def test_without_a_tokenizer_there_are_ids(tmp_path, wording):
    run = OpenRun("run", make_run(tmp_path / "run", steps=1))
    told = tokens(run, RolloutAddress(step=0, group=0, number=0))
    assert told["samples"][0]["texts"] is None
    assert told["missing"] == wording


def test_without_the_batch_there_are_no_tokens(tmp_path, refusal):
    run = OpenRun("run", make_run(tmp_path / "run", steps=1, tokens=False))
    with refusal(UsageError):
        tokens(run, RolloutAddress(step=0, group=0, number=0))


def test_logs_are_text_and_are_chosen(ask):
    told = ask("logs")
    assert told["attempts"] == [1]
    assert "<script>" in told["lines"][0]["text"]
    assert [one["text"] for one in ask("logs", process="trainer")["lines"]] == ["22:13:22    INFO Step 0 ��"]
    assert ask("logs", text="STEP 0")["found"] == 1
    assert ask("events")["events"][0]["event"] == "weights"
    assert ask("settings")["settings"]["orchestrator"] == {"batch_size": 8}
