"""`rl rollouts --export`: rollouts of a run in the formats of other tools."""

import json

import pytest
from tests.command import run_here
from tests.run.made_runs import made_run

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e{{ 7 * 7 }} ``` \x00 planted-secret-0123456789"
BROKEN = b'{"task_id": "\xff"}\n{"task_id": "\\ud800"}\n'
CALLS = [
    {"role": "system", "content": "You have tools."},
    {"role": "user", "content": "add 1 and 2"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "a tool helps",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
            {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    {"role": "assistant", "content": "It is 3"},
]


def line(group, number, reward, **changes):
    messages = [{"role": "user", "content": f"say {group}"}, {"role": "assistant", "content": "hm"}]
    one = {"group": group, "task_id": f"task-{group}", "env": "words", "reward": reward, "turns": 1}
    one |= {"stop_reason": "answered", "completion_tokens": 7, "messages": messages, "text": ["hm"]}
    return {**one, "components": {"form": 0.5}, "advantages": [0.25], **changes}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run with a tool conversation, a hostile rollout, one without a reward, and an evaluation."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SOME_API_KEY", "planted-secret-0123456789")
    run = made_run(tmp_path / "made")
    first = [line(1, 0, 1.0, messages=CALLS), line(1, 1, 0.0, truncated=True)]
    hostile = [{"role": "<b>user", "content": HOSTILE}, {"role": "assistant", "content": "y" * 5_000_000}]
    second = [line(2, 0, 0.5, task_id=HOSTILE[:40], messages=hostile), line(2, 1, None, error="no such tool")]
    for step, lines in ((0, first), (1, second)):
        (run / "rollouts").mkdir(exist_ok=True)
        text = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        (run / "rollouts" / f"step_{step}.jsonl").write_bytes(text + BROKEN * step)
    (run / "evals" / "step_0").mkdir(parents=True)
    evaluated = {"task_id": "held-out", "rollout": 0, "data": {}, "reward": 1.0, "messages": CALLS[-1:]}
    (run / "evals" / "step_0" / "words.jsonl").write_text(json.dumps(evaluated) + "\n")
    (run / "evals" / "step_0" / "words.json").write_text("{}")
    return run


def export(run, kind, *words, code=0):
    done = run_here("rl", "rollouts", run, "--export", kind, *words, cwd=run.parent)
    assert done.returncode == code, done.stderr
    return done


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_have_the_columns_of_the_frame_and_the_messages(run, wording):
    done = export(run, "jsonl")
    assert done.stdout == f"{run}/exports/rollouts-jsonl: 5 rollouts\n"
    assert done.stderr == wording
    found = rows(run / "exports" / "rollouts-jsonl" / "rollouts.jsonl")
    assert [(one["split"], one["step"], one["group"], one["number"]) for one in found] == [
        *(("train", 0, 1, 0), ("train", 0, 1, 1), ("train", 1, 2, 0), ("train", 1, 2, 1), ("eval", 0, 0, 0))
    ]
    assert [one["reward"] for one in found] == [1.0, 0.0, 0.5, None, 1.0]
    assert found[0]["messages"] == CALLS
    assert found[1]["truncated"] is True
    assert (found[0]["advantage"], json.loads(found[0]["components"])) == (0.25, {"form": 0.5})
    said = found[2]["messages"][0]["content"]
    assert said == HOSTILE.replace("planted-secret-0123456789", "(redacted)")
    done = export(run, "jsonl", "--out", "again", "--step", 0, "--min-reward", 1, "--json")
    assert json.loads(done.stdout) == {"run": str(run), "directory": "again", "found": 2}
    assert [one["reward"] for one in rows(run.parent / "again" / "rollouts.jsonl")] == [1.0, 1.0]


@pytest.mark.slow  # imports Inspect
def test_inspect_reads_its_logs(run):
    inspect_log = pytest.importorskip("inspect_ai.log")
    export(run, "inspect")
    folder = run / "exports" / "rollouts-inspect"
    names = [path.name for path in sorted(folder.glob("*.eval"))]
    assert names == ["eval-words-step-0.eval", "train-words-step-0.eval", "train-words-step-1.eval"]
    first, second = (inspect_log.read_eval_log(str(folder / name)) for name in names[1:])
    assert first.status == second.status == "success"
    assert first.eval.metadata == {"split": "train", "step": 0, "environment": "words"}
    assert first.results.scores[0].metrics["mean"].value == 0.5
    good, cut = first.samples
    assert [(one.id, one.epoch) for one in first.samples] == [("task-1", 1), ("task-1", 2)]
    assert [message.role for message in good.input] == ["system", "user"]
    assert [message.role for message in good.messages][2:] == ["assistant", "tool", "assistant"]
    assert good.messages[2].tool_calls[0].arguments == {"a": 1, "b": 2}
    assert "{broken" in good.messages[2].tool_calls[1].parse_error
    assert good.messages[3].tool_call_id == "c1"
    assert (good.scores["reward"].value, good.output.completion) == (1.0, "It is 3")
    assert cut.output.stop_reason == "max_tokens"
    hostile, failed = second.samples
    assert "planted-secret" not in hostile.messages[0].text
    assert "<script>alert(1)</script>" in hostile.messages[0].text
    assert len(hostile.messages[1].text) == 5_000_000
    assert (failed.scores, failed.error.message) == ({}, "no such tool")
    assert second.results.scores[0].unscored_samples == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("jsonl", "--out", "made"), "BK-FILE-EXISTS"),
        (("csv",), "BK-CLI-ARGUMENT"),
    ],
)
def test_wrong_usage(run, words, message):
    assert message in export(run, *words, code=2).stderr
    assert not (run / "exports").exists()


def test_nothing_to_export_is_said(run, wording):
    assert export(run, "jsonl", "--step", 9, code=1).stderr == wording
    assert not (run / "exports" / "rollouts-jsonl").exists()


@pytest.mark.slow  # imports Inspect
def test_environments_of_like_names_are_files_of_their_own(run):
    pytest.importorskip("inspect_ai.log")
    lines = [line(1, 0, 1.0, env=env) for env in ("org/sums", "org_sums", "ORG/sums")]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (run / "rollouts" / "step_1.jsonl").write_text(text)
    export(run, "inspect", "--step", 1)
    logs = (run / "exports" / "rollouts-inspect").iterdir()
    assert len({path.name.casefold() for path in logs}) == 3
