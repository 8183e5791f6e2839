"""`buckeye eval` on MCP servers: native tool calls over the chat API, and a local model."""

import json
import os
import sys

import pytest

from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from tests.evaluation.chat_server import chat_server
from tests.evaluation.test_eval_command import evaluate, rows
from tests.places import ROOT
from tests.ports import free_port

RAW = ROOT / "tests/mcp/environment/raw_server.py"
GAME = ROOT / "environments" / "text_2048"
CONFIG = """
system_prompt: Win.
parser: {format: tools}
action_mappings:
  act: {_tool: act, text: {from_arg: text}}
rubric: {weights: {task_completion: 1.0}}
"""


@pytest.fixture
def gym(tmp_path):
    """Return the arguments of an environment with two tasks on a well-behaved server."""
    tasks = [
        {
            "id": f"task-{n}",
            "prompt": "Say win.",
            "mcp_config": {"board": {"command": sys.executable, "args": [str(RAW)]}},
            "setup_tool": {"name": "setup"},
            "evaluate_tool": {"name": "evaluate"},
        }
        for n in range(2)
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    (tmp_path / "gym.yaml").write_text(CONFIG)
    return ["--arg", f"dataset={tmp_path / 'tasks.json'}", "--arg", f"config_path={tmp_path / 'gym.yaml'}"]


def test_native_tool_calls_over_the_chat_api(gym, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "act", "arguments": '{"text": "win"}'}}

    def answer(body, _):
        if body["messages"][-1]["role"] == "tool":
            return "I won."
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    with chat_server(answer) as (url, requests):
        done = evaluate("mcp", tmp_path, *gym, "--base-url", url, "--model", "m", "--json")
    report = json.loads(done.stdout)
    assert (report["scored"], report["reward"]["value"]) == (2, 1.0)
    assert report["stop_reasons"] == {"answered": 2}
    assert [tool["function"]["name"] for tool in requests[0][1]["tools"]] == ["act", "done"]
    conversation = rows(tmp_path)[0]["messages"]
    assert [m["role"] for m in conversation] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation[3]["content"].endswith("win.")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a runtime for images")
@pytest.mark.e2e
def test_a_gateway_is_started_for_tasks_that_expect_one(gym, tmp_path):
    address = f"http://localhost:{free_port()}/mcp"
    task = json.loads((tmp_path / "tasks.json").read_text())[0]
    task["mcp_config"] = {"b": {"url": address, "headers": {"Authorization": "Bearer $buckeye_API_KEY"}}}
    (tmp_path / "tasks.json").write_text(json.dumps(task))
    words = [*gym, "--base-url", "http://127.0.0.1:1/v1", "--model", "m", "--retries", "0"]
    done = evaluate("mcp", tmp_path, *words, code=1, XDG_CACHE_HOME=str(tmp_path))
    assert "Mcp-Image" in done.stderr
    assert "Gateway stopped" in (tmp_path / "out" / "gateway.log").read_text()


@pytest.mark.slow
def test_a_local_model_on_text_2048(tmp_path):
    """A model with random weights is served and scores 0; the same seed gives the same rollouts."""
    model = tmp_path / "model"
    size = TinySize(vocab_size=300, layers=1, hidden=64, max_length=512)
    make_tiny_model(model, texts=["Play 2048."], size=size, seed=0)
    arguments = [
        *("--arg", f"dataset={GAME / 'tasks.json'}", "--arg", f"config_path={GAME / 'text_2048.yaml'}"),
        *("--model", str(model), "--max-tokens", "8", "-n", "2", "-r", "2", "--json"),
    ]
    first = json.loads(evaluate("mcp", tmp_path / "a", *arguments).stdout)
    again = json.loads(evaluate("mcp", tmp_path / "b", *arguments).stdout)
    assert (first["split"], first["scored"], first["errored"]) == ("eval", 4, 0)
    assert first["means"]["moves"] == 0.0
    assert first["reward"] == again["reward"]
    said = [
        [row["messages"][-1]["content"] for row in sorted(rows(tmp_path / name), key=order)] for name in "ab"
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) > 1


def order(row):
    return row["task_id"], row["rollout"]
