"""Results of other trainers open as a run; what is not in them is said."""

import json

import pytest
from starlette.testclient import TestClient

from buckeye.base.distribution import is_there
from buckeye_ui.server import create_app
from buckeye_ui.sources import Sources

pytestmark = pytest.mark.skipif(not is_there("buckeye_audit"), reason="buckeye-audit reads them")
SAID = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "<think>easy</think>2"}]


def output(task, reward):
    return {
        "example_id": task,
        "prompt": SAID[:1],
        "completion": SAID[1:],
        "reward": reward,
        "task": "org/math",
    }


def trace(task, score):
    nodes = [{"parent": at - 1 if at else None, "message": said} for at, said in enumerate(SAID)]
    of_it = {"task": {"key": task}, "info": {"prime_rl": {"env_name": "sums"}}, "ok": True}
    return {"nodes": nodes, "rewards": {"exact": {"score": score}}, **of_it}


def put(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def ask(tmp_path):
    put(tmp_path / "math--m" / "results.jsonl", output(7, 1.0), output(7, 0.0), output(8, 1.0), ["odd"])
    for step, score in enumerate((0.0, 0.5)):
        path = tmp_path / "prime" / "rollouts" / f"step_{step}" / "train_rollouts.jsonl"
        put(path, trace("a", score), trace("a", 1.0))
    with TestClient(create_app(Sources(str(tmp_path))), base_url="http://127.0.0.1:8420") as client:

        def asked(place, **given):
            answer = client.get(f"/api/runs{place}", params=given)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield asked


def test_both_are_listed_and_what_they_lack_is_said(ask):
    kinds = {one["name"]: one["state"] for one in ask("")["runs"]}
    assert kinds == {"math--m": "of verifiers", "prime": "of prime-rl"}
    status = ask("/math--m/status")
    assert "settings, logs and tokens are not in such a folder; results.jsonl: 1 lines" in status["note"]
    assert ask("/prime/logs")["missing"] == "Results of prime-rl have no logs."
    assert ask("/prime/settings") == {"settings": {}}


def test_their_rollouts_and_rewards_are_shown(ask):
    overview = ask("/prime/overview")
    assert (overview["steps"], overview["reward"]) == ([0, 1], [0.5, 0.75])
    assert (ask("/prime/status")["step"], ask("/prime/status")["reward"]) == (2, 0.75)
    (measured,) = ask("/math--m/overview")["evaluations"]
    assert (measured["env"], measured["mean_reward"], measured["n"]) == ("org_math", 0.75, 3)
    told = ask("/math--m/rollout", split="eval", step=0, group=0, number=1, env="org_math")
    assert told["messages"][1]["text"] == "2"
    assert told["messages"][1]["reasoning"] == "easy"
    assert ask("/prime/rollout", step=1, group=0, number=0)["components"] == {"exact": 0.5}


def test_what_is_added_is_seen_and_nothing_is_written_beside_it_but_notes(ask, tmp_path):
    assert ask("/prime/overview")["steps"] == [0, 1]
    put(tmp_path / "prime" / "rollouts" / "step_2" / "train_rollouts.jsonl", trace("a", 1.0))
    assert ask("/prime/overview")["reward"] == [0.5, 0.75, 1.0]
    assert [path.name for path in (tmp_path / "prime").iterdir()] == ["rollouts"]
    assert not list((tmp_path / "prime" / "rollouts").glob("*.sqlite"))
