"""Sessions of OpenEnv on a server of one slot that the tests know: messages, actions, room and errors."""

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import pytest
from tests.waiting import HANG
from tests.workers.adapters.scripted import Speaker
from websockets.sync.server import serve as serve_sockets

from buckeye.workers.proxy import Limits, serve
from buckeye.workers.worker_side.adapters.base import AdapterError
from buckeye.workers.worker_side.adapters.openenv import OpenEnv

TEXT = {"required": ["text"], "properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}}
PAIR = {"required": ["a", "b"], "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def observed(seen, reward=None, done=False):
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


def failed(code, **more):
    return {"type": "error", "data": {"message": "no", "code": code, **more}}


@contextlib.contextmanager
def game(answers, schema=TEXT, *, has_rivals=False):
    """Yield the URL of a server with these answers to steps, and a list of requests and of refusals.

    With `has_rivals`, the server answers nothing before it has refused a session.
    """
    asked, slot, refused = [], threading.Lock(), threading.Event()

    def session(connection):
        if not slot.acquire(blocking=False):
            asked.append("refused")
            refused.set()
            connection.send(json.dumps(failed("CAPACITY_REACHED")))
            return
        try:
            for text in connection:
                if has_rivals:
                    refused.wait(HANG)
                request = json.loads(text)
                asked.append((request["type"], request["data"]))
                start = observed({"seen": "start", "metadata": {"hidden": 1}})
                connection.send(json.dumps(start if request["type"] == "reset" else answers.pop(0)))
        finally:
            slot.release()

    def respond(connection, request):
        body = json.dumps({"action": schema})
        return None if request.path == "/ws" else connection.respond(200, body)

    with serve_sockets(session, "127.0.0.1", 0, process_request=respond) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", asked
        server.shutdown()


def play(url, replies, *, count=1, limits=None, **args):
    """Return the outcomes of the first tasks with these replies, and the conversation of each last call."""
    speakers = [Speaker(lambda messages, tools, turn: replies[turn]) for _ in range(count)]

    async def rollout(adapter, task, speaker):
        async with serve(speaker, limits=limits or Limits()) as endpoint:
            address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": "policy"}
            return await adapter.rollout(task, address, {})

    async def run():
        adapter = OpenEnv("openenv/game", {"url": url, **args})
        tasks = list(adapter.tasks("train"))
        return await asyncio.gather(*(rollout(adapter, *one) for one in zip(tasks, speakers, strict=False)))

    outcomes = asyncio.run(run())
    return outcomes, [[m["content"] for m in speaker.heard[-1]] for speaker in speakers]


def test_a_reply_is_the_only_text_of_an_action():
    answers = [
        observed({"seen": "a", "left": 2}, 0.5),
        observed({"seen": "b"}, None),
        observed({}, True, True),
    ]
    with game(answers) as (url, asked):
        ((outcome,), (heard,)) = play(url, ["x", "y", "z"], seed=7, reset={"unit": 2}, system_prompt="Go.")
    assert heard == ["Go.", "start", "x", '{"seen": "a", "left": 2}', "y", "b"]
    assert asked == [
        ("reset", {"seed": 7, "unit": 2}),
        *(("step", {"text": text}) for text in ("x", "y", "z")),
    ]
    assert (outcome["reward"], outcome["turn_rewards"]) == (1.5, [0.5, 0.0, 1.0])
    assert outcome["components"] == {"invalid_actions": 0, "turns": 3}


def test_a_reply_is_json_and_what_is_no_action_is_answered():
    errors = [{"loc": ["b"], "msg": "Field required"}]
    answers = [failed("VALIDATION_ERROR", errors=errors), observed({"seen": "a"}, 1.0, True)]
    with game(answers, PAIR) as (url, asked):
        ((outcome,), (heard,)) = play(url, ["none", '{"a": 1}', '{So} {"a": 2}: {"a": 1, "b": 2}. {'])
    assert heard[0] == f"Reply with a JSON object of this schema: {json.dumps(PAIR)}"
    assert heard[3::2] == ["Not an action: not a JSON object", "Not an action: no: b: Field required"]
    assert [data for kind, data in asked if kind == "step"] == [{"a": 1}, {"a": 1, "b": 2}]
    assert (outcome["turn_rewards"], outcome["components"]["invalid_actions"]) == ([0.0, 0.0, 1.0], 2)


@pytest.mark.parametrize(
    ("answers", "limits", "reward", "boundary"),
    [
        ([failed("EXECUTION_ERROR")], None, None, "step"),
        ([observed({"seen": "a"}, None, True)], None, None, "score"),
        ([observed({"seen": "a"}, 0.5)], Limits(max_turns=1), 0.5, None),
    ],
)
def test_every_exit_ends_the_session(answers, limits, reward, boundary):
    """Run three rollouts on a server of one slot: the later ones wait until it has room."""
    with game(answers * 3, has_rivals=True) as (url, asked):
        outcomes, _ = play(url, ["x", "x"], count=3, limits=limits)
    assert [outcome["reward"] for outcome in outcomes] == [reward] * 3
    assert [outcome["error"] and outcome["error"]["boundary"] for outcome in outcomes] == [boundary] * 3
    assert "refused" in asked


def test_no_server_is_refused(refusal):
    with refusal(AdapterError):
        OpenEnv("openenv/game", {"url": "file:///etc/passwd"})
    with pytest.raises(AdapterError, match="no server at http"):
        OpenEnv("openenv/game", {"url": "http://127.0.0.1:9"})


def test_a_session_ends_with_python_3_10(monkeypatch):
    """Python 3.10 has no `asyncio.timeout`."""
    members = {name: value for name, value in vars(asyncio).items() if name != "timeout"}
    monkeypatch.setattr("buckeye.workers.worker_side.adapters.openenv.asyncio", SimpleNamespace(**members))
    with game([observed({"seen": "a"}, 1.0, True)]) as (url, _):
        ((outcome,), _) = play(url, ["x"])
    assert outcome["reward"] == 1.0
