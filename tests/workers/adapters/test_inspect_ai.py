"""Tasks of Inspect in a library that the tests know: messages, scores and errors."""

import asyncio
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tests.workers.adapters.scripted import Speaker, call

from buckeye.workers.proxy import Limits, serve
from buckeye.workers.worker_side.adapters.base import AdapterError
from buckeye.workers.worker_side.adapters.inspect_ai import InspectAI


class Limit(Exception):
    pass


class Record(SimpleNamespace):
    """Object with any fields, and a `text` that is its content."""

    numbers = itertools.count()

    def __init__(self, **fields):
        super().__init__(**{"id": next(self.numbers), "tool_calls": None, "error": None, **fields})

    @property
    def text(self):
        return self.content

    def model_copy(self, deep):
        return Record(**vars(self))


def message(role, content, **more):
    return Record(role=role, content=content, **more)


async def solve(state, generate):
    """Reply; execute a call of the tool, which doubles a number, and reply again."""
    state = await generate(state)
    for made in state.messages[-1].tool_calls or ():
        if made.arguments == "{}":
            raise OSError("the tool broke")
        state.messages.append(message("tool", made.arguments * 2, tool_call_id=made.id))
        state = await generate(state)
    return state


def scorer(name, value):
    async def score(state, target):
        if state.messages[-1].content == "break":
            raise OSError("the scorer broke")
        return Record(value=value(state.messages[-1].content, target))

    score.name = name
    return score


SCORERS = [
    scorer("match", lambda text, target: "C" if text == target else "I"),
    scorer("parts", lambda text, target: {"length": len(text), "note": "unknown"}),
]
closed = []


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """Make `import inspect_ai` find a minimal library."""
    closed.clear()
    state = SimpleNamespace(current=None)
    tool = Record(name="double", description="Double.", parameters=SimpleNamespace(model_dump=lambda **_: {}))

    async def cleanup(done):
        closed.append(done.sample_id)

    def load_tasks(specs, settings):
        if specs != ["file.py@name"]:
            raise LookupError("no such task")
        sample = Record(
            id="s", input="2 + 2?", target="4", sandbox=settings.get("box"), choices=None, metadata={}
        )
        fields = {"dataset": [sample, sample], "sandbox": None, "message_limit": None, "solver": solve}
        config = SimpleNamespace(merge=lambda given: given)
        return [SimpleNamespace(**fields, scorer=SCORERS, cleanup=cleanup, config=config)]

    def get_model(name, custom_outputs=None, **_):
        return custom_outputs

    async def task_generate(model, current, tool_calls, cache, config):
        output = await model(current.messages, [tool], "auto", config)
        current.messages.append(output.choices[0].message)
        return current

    modules = {
        "model": {
            **dict.fromkeys(("GenerateConfig", "ChatCompletionChoice", "ModelOutput", "ModelUsage"), Record),
            "ChatMessageAssistant": lambda **fields: message("assistant", **fields),
            "ModelName": str,
            "get_model": get_model,
        },
        "model._model": {"init_sample_model_data": lambda: None},
        "model._call_tools": {
            "parse_tool_call": lambda number, name, arguments, tools: Record(
                id=number, function=name, arguments=arguments
            )
        },
        "scorer": {"Target": str},
        "util": {"LimitExceededError": lambda *_, **__: Limit()},
        "util._store": {"init_subtask_store": lambda store: None},
        "log._transcript": {"Transcript": lambda: None, "init_transcript": lambda transcript: None},
        "solver._task_state": {
            "TaskState": lambda **fields: Record(**fields, store=None, scores=None),
            "set_sample_state": lambda new: setattr(state, "current", new),
            "sample_state": lambda: state.current,
        },
        "_eval.loader": {"load_tasks": load_tasks},
        "_eval.context": {"init_task_context": lambda *_: None},
        "_eval.task.util": {"sample_messages": lambda sample: [message("user", sample.input)]},
        "_eval.task.run": {
            "task_generate": task_generate,
            "resolve_plan": lambda task, solver: task.solver,
        },
        "_util.registry": {"registry_unqualified_name": lambda score: score.name},
    }
    for name, members in modules.items():
        module = ModuleType(f"inspect_ai.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["inspect_ai.util"].LimitExceededError = Limit
    monkeypatch.setattr(Limit, "__init__", lambda self, *_, **__: None)


def play(replies, *, limits=None, **args):
    """Return the outcome of the first task with these replies, and the requests."""
    speaker = Speaker(lambda messages, tools, turn: replies[turn])

    async def run():
        adapter = InspectAI("inspect-ai/file.py@name", args)
        async with serve(speaker, limits=limits or Limits()) as endpoint:
            address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": "policy"}
            return await adapter.rollout(next(adapter.tasks("train")), address, {})

    return asyncio.run(run()), speaker.heard


def test_calls_and_their_results_extend_the_conversation_unchanged():
    spaced = call("double", {})
    spaced["tool_calls"][0]["function"]["arguments"] = '{ "n" :2}'
    outcome, heard = play([spaced, "4"])
    assert (outcome["reward"], outcome["stop_reason"]) == (1.0, "done")
    assert outcome["components"] == {"match": 1.0, "parts.length": 1.0}
    assert heard[1][:1] == heard[0]
    assert heard[1][1]["tool_calls"][0]["function"]["arguments"] == '{ "n" :2}'
    assert heard[1][2] == {"role": "tool", "content": '{ "n" :2}' * 2, "tool_call_id": "call-1"}
    assert closed == ["s"]


@pytest.mark.parametrize(
    ("replies", "args", "limits", "reward", "boundary"),
    [
        (["four"], {"score": "parts.length"}, None, 4.0, None),
        (["4"], {"score": "parts.note"}, None, None, "score"),
        (["4"], {"score": "other"}, None, None, "score"),
        (["break"], {}, None, None, "score"),
        ([call("double", {})], {}, None, None, "step"),
        ([call("double", {"n": 1})], {}, Limits(max_turns=1), 0.0, None),
    ],
)
def test_rewards_and_errors(replies, args, limits, reward, boundary):
    outcome, _ = play(replies, limits=limits, **args)
    assert outcome["reward"] == reward
    assert (outcome["error"] and outcome["error"]["boundary"]) == boundary
    assert closed == ["s"]


def test_scorers_of_one_name_are_all_scores(monkeypatch):
    scorers = [scorer("match", lambda *_, value=value: value) for value in (1.0, 0.0, 0.5)]
    monkeypatch.setattr(sys.modules[__name__], "SCORERS", scorers)
    outcome, _ = play(["4"])
    assert outcome["components"] == {"match": 1.0, "match1": 0.0, "match2": 0.5}
    assert outcome["reward"] == 1.0


@pytest.mark.parametrize(("env_id", "args"), [("file.py@name", {"box": "docker"}), ("other", {})])
def test_a_task_that_cannot_be_run_is_refused(env_id, args, refusal):
    with refusal(AdapterError):
        InspectAI(f"inspect-ai/{env_id}", args)
