"""`rl export-rollouts`: what a run has played, as other tools read it."""

import json

import pytest
from tests.command import run_here
from tests.run.fake_hub import FakeHub
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
    """A conversation with tools, a hostile rollout, one without a reward, and an evaluation."""
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


def export(run, *words, code=0, env=None):
    done = run_here("rl", "export-rollouts", run, *words, cwd=run.parent, env=env)
    assert done.returncode == code, done.stderr
    return done


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_have_the_columns_of_the_frame_and_the_messages(run):
    done = export(run)
    assert done.stdout == f"{run}/exports/rollouts-jsonl: 5 rollouts\n"
    assert done.stderr == "warning: left out: rollouts/step_1.jsonl: 2 lines that are no rollouts\n"
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
    export(run, "--out", "again", "--split", "eval", "--steps", "0-3")
    assert len(rows(run.parent / "again" / "rollouts.jsonl")) == 1


def test_parquet_is_the_same(run):
    parquet = pytest.importorskip("pyarrow.parquet")
    export(run, "--format", "parquet", "--split", "train")
    table = parquet.read_table(run / "exports" / "rollouts-parquet" / "rollouts.parquet")
    assert table.column("reward").to_pylist() == [1.0, 0.0, 0.5, None]
    assert json.loads(table.column("messages")[0].as_py()) == CALLS
    assert str(table.schema.field("step").type) == "int32"
    assert str(table.schema.field("truncated").type) == "bool"


def test_session_traces_are_as_the_hub_documents_them(run):
    export(run, "--format", "sts")
    folder = run / "exports" / "rollouts-sts"
    assert "- agent-traces" in (folder / "README.md").read_text()
    sessions = {path.stem: rows(path) for path in (folder / "sessions").iterdir()}
    assert len(sessions) == len({header["id"] for header, *_ in sessions.values()}) == 5
    for header, *messages in sessions.values():
        assert header["type"] == "session"
        assert all(isinstance(header[name], str) and header[name] for name in ("harness", "id", "name"))
        assert messages
        for line in messages:
            assert line["type"] == "message"
            message = line["message"]
            assert message["role"] in ("user", "assistant", "system", "tool")
            assert isinstance(message["content"], str)
            for call in message.get("toolCalls", ()):
                assert isinstance(call["id"], str)
                assert isinstance(call["function"]["arguments"], str)
    called, result = (line["message"] for line in sessions["train-words-step-0-1-0"][3:5])
    assert called["reasoningContent"] == "a tool helps"
    assert called["toolCalls"][1] == {"id": "c2", "function": {"name": "add", "arguments": "{broken"}}
    assert (result["role"], result["toolCallId"], result["content"]) == ("tool", "c1", "3")


@pytest.mark.slow  # Inspect is imported
def test_inspect_reads_its_logs(run):
    inspect_log = pytest.importorskip("inspect_ai.log")
    export(run, "--format", "eval")
    folder = run / "exports" / "rollouts-eval"
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


def test_a_push_makes_a_private_dataset(run, monkeypatch):
    with FakeHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
        words = ("--split", "eval", "--push", "me/traces")
        done = export(run, *words)
        assert "uploading to me/traces (a new private repository)" in done.stdout
        assert hub.private == {"me/traces": True}
        assert {"README.md", "rollouts.jsonl"} <= hub.files["me/traces"].keys()
        again = export(run, *words, "--out", "again", code=2)
        assert "this repository has files already, and nothing is overwritten" in again.stderr
        assert not (run.parent / "again").exists()
        export(run, "--split", "eval", "--push", "me/open", "--public", "--out", "open")
        assert hub.private["me/open"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--split", "test"), "--split test: write train, eval or all"),
        (("--steps", "3-1"), "--steps 3-1: write a step as 7, or the first and the last as 0-9"),
        (("--public",), "it needs that"),
        (("--push", "name"), "write the name of a dataset repository as ORG/NAME"),
        (("--out", "made"), "made exists, and nothing is overwritten"),
        (("--format", "csv"), "error: Invalid value for '--format': 'csv' is not one of 'eval'"),
    ],
)
def test_wrong_usage(run, words, message):
    assert message in export(run, *words, code=2).stderr
    assert not (run / "exports").exists()


def test_nothing_to_export_is_said(run):
    assert "no rollouts of what was asked for" in export(run, "--steps", "9", code=1).stderr
    assert not (run / "exports" / "rollouts-jsonl").exists()


def test_results_of_verifiers_and_prime_rl(tmp_path):
    said = [{"role": "user", "content": "1 + 1"}], [{"role": "assistant", "content": "2"}]
    good = {"example_id": 7, "prompt": said[0], "completion": said[1], "reward": 1.0, "is_truncated": False}
    good |= {"stop_condition": "done", "metrics": {"exact": 1.0}, "token_usage": {"output_tokens": 3.0}}
    failed = {**good, "reward": 0.0, "error": {"error": "ToolError", "error_chain_str": "ToolError: no"}}
    nodes = [
        {"parent": None, "message": said[0][0]},
        {"parent": 0, "message": {"role": "assistant", "content": "left aside"}, "sampled": True},
        {"parent": 0, "message": said[1][0], "sampled": True},
    ]
    trace = {"nodes": nodes, "rewards": {"exact": {"score": 0.5, "weight": 2.0}, "late": None}, "ok": True}
    trace |= {"task": {"type": "T", "data": {}, "key": "k"}, "info": {"prime_rl": {"env_name": "sums"}}}
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (good, failed)) + '{"a')
    (tmp_path / "metadata.json").write_text(json.dumps({"env_id": "math", "model": "org/m"}))
    (tmp_path / "rollouts" / "step_3").mkdir(parents=True)
    stopped = {**trace, "ok": False, "errors": [{"type": "E", "message": "lost"}]}
    lines = json.dumps(trace) + "\n" + json.dumps(stopped) + "\n"
    (tmp_path / "rollouts" / "step_3" / "train_rollouts.jsonl").write_text(lines)
    done = export(tmp_path, "--out", tmp_path / "out")
    assert "left out: results.jsonl: 1 lines that are no rollouts" in done.stderr
    found = rows(tmp_path / "out" / "rollouts.jsonl")
    keys = ("split", "step", "env", "task", "group", "number", "reward", "error")
    assert [tuple(one[key] for key in keys) for one in found] == [
        ("eval", 0, "math", "7", 0, 0, 1.0, None),
        ("eval", 0, "math", "7", 0, 1, None, "ToolError: no"),
        ("train", 3, "sums", "k", 0, 0, 1.0, None),
        ("train", 3, "sums", "k", 0, 1, None, "E: lost"),
    ]
    assert found[0]["messages"] == found[2]["messages"] == [*said[0], *said[1]]
    assert "`org/m`" in (tmp_path / "out" / "README.md").read_text()


def test_a_line_that_is_too_long_is_left_out_and_those_after_it_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("buckeye_audit.exchange.foreign._LONGEST_LINE", 1000)
    short = {"example_id": 1, "prompt": "1", "completion": "2", "reward": 1.0}
    lines = [short, {**short, "completion": "x" * 5000}, {**short, "example_id": 2}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    done = export(tmp_path, "--out", tmp_path / "out")
    assert "results.jsonl: 1 lines that are no rollouts" in done.stderr
    assert [one["task"] for one in rows(tmp_path / "out" / "rollouts.jsonl")] == ["1", "2"]


def test_environments_of_like_names_are_files_of_their_own(run):
    lines = [line(1, 0, 1.0, env=env) for env in ("org/sums", "org_sums", "ORG/sums")]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (run / "rollouts" / "step_0.jsonl").write_text(text)
    export(run, "--format", "sts", "--split", "train", "--steps", "0")
    sessions = (run / "exports" / "rollouts-sts" / "sessions").iterdir()
    assert len({path.name.casefold() for path in sessions}) == 3
