"""Environment objects that this process serves to a run, over a real relay process."""

import asyncio
import json
import socket
import threading

import pytest

from buckeye.api.environment import EnvironmentArguments
from buckeye.envs.base import Outcome, Reply, Task
from buckeye.envs.registry import CALLER
from buckeye.envs.settings import WorkerSettings, read_placement
from buckeye.errors import UsageError
from buckeye.workers.caller import EnvironmentServer
from buckeye.workers.loading import open_environment
from buckeye.workers.process_start import WORKERS_KEY
from buckeye.workers.worker_side.frames import encode

ROWS = [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]


class Counting:
    """Environment with state of this process."""

    name = "counting"
    splits = ("train",)

    def __init__(self):
        self.prompts = []

    def tasks(self, split):
        if split != "train":
            raise KeyError(split)
        return [Task(id=str(n), messages=({"role": "user", "content": f"say {n}"},)) for n in range(4)]

    async def rollout(self, task, policy):
        self.prompts.append(task.messages[0]["content"])
        reply = await policy.chat(task.messages)
        return Outcome(reward=float(len(reply.text)))


class Echo:
    """Policy that repeats the prompt."""

    async def chat(self, messages, *, tools=()):
        text = messages[-1]["content"]
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})


@pytest.fixture
def served(monkeypatch):
    """Function that serves an object, and returns the environment as a run opens it."""
    servers = []

    def serve(environment):
        servers.append(EnvironmentServer(environment))
        for name, value in servers[-1].variables().items():
            monkeypatch.setenv(name, value)
        return open_environment(CALLER, {}, WorkerSettings(isolation="process", **read_placement(CALLER)))

    yield serve
    for server in servers:
        server.close()


def test_rollouts_run_on_the_object_of_this_process(served):
    counting = Counting()
    environment = served(counting)
    tasks = environment.tasks("train")
    outcomes = [asyncio.run(environment.rollout(task, Echo())) for task in tasks]
    assert [outcome.reward for outcome in outcomes] == [5.0] * 4
    assert counting.prompts == [f"say {n}" for n in range(4)]
    asyncio.run(environment.close())


def test_all_processes_of_a_run_share_the_event_loop_of_the_object(served):
    class Threads(Counting):
        async def rollout(self, task, policy):
            self.prompts.append(threading.get_ident())
            return Outcome(reward=1.0)

    threads = Threads()
    first = served(threads)
    second = open_environment(CALLER, {}, WorkerSettings(isolation="process", **read_placement(CALLER)))
    tasks = first.tasks("train")
    for environment in (first, second):  # the second one runs after the first has closed its connection
        assert asyncio.run(environment.rollout(tasks[0], Echo())).reward == 1.0
        asyncio.run(environment.close())
    assert threads.prompts == [threads.prompts[0]] * 2


def test_function_sees_its_columns_and_its_error_has_its_line(served):
    seen = []

    def reward(completion, answer, **row):
        seen.append((completion, answer))
        return 1 / (answer - 1)

    environment = served(EnvironmentArguments(dataset=ROWS, reward=reward).make())
    tasks = {task.messages[0]["content"]: task for task in environment.tasks("train")}
    worked = asyncio.run(environment.rollout(tasks["What is 4 + 1?"], Echo()))
    assert (worked.reward, worked.components) == (0.25, {"reward": 0.25})
    failed = asyncio.run(environment.rollout(tasks["What is 0 + 1?"], Echo()))
    assert failed.reward is None
    assert failed.boundary == "score"
    assert "test_caller.py" in failed.error
    assert seen == [("What is 4 + 1?", 5), ("What is 0 + 1?", 1)]
    asyncio.run(environment.close())


def _answer(connection):
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def test_without_the_process_of_the_object_a_resume_is_refused(monkeypatch):
    monkeypatch.delenv("BUCKEYE_PLACED", raising=False)
    with pytest.raises(UsageError) as refused:
        open_environment(CALLER, {}, WorkerSettings())
    assert refused.value.code == "BK-ENV-CALLER"


def test_connection_without_the_key_gets_no_answer():
    server = EnvironmentServer(Counting())
    (place,) = json.loads(server.variables()["BUCKEYE_PLACED"]).values()
    assert place["nodes"][0][0] == "127.0.0.1"
    assert len(server.variables()[WORKERS_KEY]) >= 24
    for request in (encode({"type": "start", "key": "wrong"}), b"GET / HTTP/1.1\r\n\r\n" * 10):
        with socket.create_connection(tuple(place["nodes"][0]), timeout=20) as connection:
            connection.sendall(request)
            assert _answer(connection) == b""
    server.close()
