"""Busy is never dead: thousands of requests at once, and weights that take long to load, with traffic."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace

import httpcore
import pytest

from buckeye.base.process import raise_open_files_limit
from buckeye.inference.client import InferenceClient
from tests.waiting import HANG

from .test_client import GENERATE, IDS
from .test_replicas import PARAMS, FakeReplica, bring, publish, slow, started, update, watched

PLAYERS = 8
SYNCING = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc")


def test_a_connection_that_breaks_is_no_server_that_is_lost():
    """The system of a busy server resets some: what they asked is asked again, and nothing else happens."""
    with FakeReplica() as a:

        async def use(client):
            answer = a.answers[GENERATE]
            a.answers[GENERATE] = lambda body: None if a.calls[GENERATE] <= 7 else answer(body)
            await asyncio.gather(*(client.generate([i], PARAMS) for i in range(40)))
            return client.metrics()

        metrics = watched([a], use)
        assert Counter(prompt[0] for prompt in a.prompts) == Counter(range(40))
    assert metrics["inference/requeued"] == 7
    assert metrics["inference/0/failures"] == 0


def test_a_server_whose_connections_break_and_that_does_not_answer_is_lost():
    with FakeReplica() as a, FakeReplica() as b:

        async def use(client):
            a.answers |= dict.fromkeys(a.answers, lambda _: None)
            await asyncio.gather(*(client.generate([i], PARAMS) for i in range(40)))
            return client.metrics()

        metrics = watched([a, b], use)
        assert Counter(prompt[0] for prompt in b.prompts) == Counter(range(40))
    assert (metrics["inference/0/failures"], metrics["inference/1/failures"]) == (1, 0)


def test_what_a_request_costs_does_not_grow_with_their_number(monkeypatch):
    """A pool of connections looks at each of them for every request."""
    looks = Counter()
    is_closed = httpcore.AsyncHTTPConnection.is_closed

    def counted(connection):
        looks["now"] += 1
        return is_closed(connection)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "is_closed", counted)
    with FakeReplica() as a:

        async def use(client):
            for count in (8, 320):
                together = threading.Barrier(count)  # all are in flight at the same time
                a.on_generate = lambda together=together: together.wait(HANG)
                await asyncio.gather(*(client.generate([i], PARAMS) for i in range(count)))
                looks[count] = looks.pop("now") / count

        watched([a], use)
    assert looks[320] < 2 * looks[8]


@pytest.mark.slow
def test_8192_requests_at_once(chat_model, tmp_path):
    """Every one is answered, and the server is neither suspected nor started anew."""
    raise_open_files_limit()
    count, params, reported = 8192, replace(PARAMS, max_tokens=16), []

    async def main(url):
        client = InferenceClient(
            [url],
            api_key=None,
            timeout=HANG,
            model=str(chat_model.directory),
            heartbeat_timeout=10.0,
            on_broken=lambda *report: reported.append(report),
        )
        async with client:
            await client.wait_ready(HANG)
            calls = (client.generate([i % 256, *IDS], replace(params, seed=i)) for i in range(count))
            return await asyncio.gather(*calls), client.metrics()

    with started(chat_model, tmp_path / "server") as (server,):
        generations, metrics = asyncio.run(main(server.url))
        assert server.process.poll() is None
    assert len(generations) == metrics["inference/0/requests"] == count
    assert all(len(generation.token_ids) == params.max_tokens for generation in generations)
    assert (metrics["inference/0/failures"], metrics["inference/0/restarts"]) == (0, 0)
    assert not reported


# --- weights that take long, with traffic ---


async def played_through(client, updating):
    """Rollouts one after another in each of several places, until an update has ended and each has played
    once more. What they were given."""
    generations, updated = [], asyncio.ensure_future(updating)

    async def play(number):
        last = False
        while not last:
            last = updated.done()
            params = replace(PARAMS, seed=len(generations))
            generations.append(await client.generate([*IDS, number], params))
            await asyncio.sleep(0.02)

    await asyncio.gather(updated, *(play(number) for number in range(PLAYERS)))
    return generations


def slow_updates(fake, seconds):
    """Its engine answers nothing while it loads weights: neither questions nor requests."""
    loading = threading.Lock()
    update_weights, rpc, generate = (
        fake.answers[r] for r in ("/update_weights", "/collective_rpc", GENERATE)
    )

    def load(body):
        with loading:
            return slow(update_weights, seconds)(body)

    def waits(answer):
        def wait(body):
            with loading:
                return answer(body)

        return wait

    fake.answers |= {"/update_weights": load, "/collective_rpc": waits(rpc), GENERATE: waits(generate)}


def through_a_load_of_vllm(tmp_path, seconds, heartbeat):
    reported = []
    with FakeReplica() as a, FakeReplica() as b:
        for fake in (a, b):
            fake.answers["/v1/models"] = (200, {"data": [{"id": "m", "owned_by": "vllm"}]})
            slow_updates(fake, seconds)

        async def use(client):
            generations = await played_through(client, update(client, tmp_path, 5, None))
            return generations, client.metrics()

        settings = {"heartbeat_timeout": heartbeat, "on_broken": lambda *report: reported.append(report)}
        generations, metrics = watched([a, b], use, **settings)
        assert len(a.prompts) + len(b.prompts) == len(generations)
    assert {generation.versions[0] for generation in generations[-PLAYERS:]} == {5}
    assert not reported
    assert_nobody_suspected(metrics)


def assert_nobody_suspected(metrics):
    assert metrics["inference/requeued"] == 0
    assert {metrics[f"inference/{i}/{what}"] for i in range(2) for what in ("failures", "restarts")} == {0}


def test_a_load_longer_than_a_heartbeat_is_held_against_nobody(tmp_path):
    through_a_load_of_vllm(tmp_path, seconds=3.0, heartbeat=0.3)


@pytest.mark.slow
def test_a_load_of_a_minute_is_held_against_no_vllm(tmp_path):
    through_a_load_of_vllm(tmp_path, seconds=60.0, heartbeat=5.0)


SLOW_LOAD = """
import time
from buckeye.cli.main import main
from buckeye.inference.server import admin
from buckeye.inference.engine.engine import Engine

def slow(function):
    def called(*words):
        time.sleep(60.0)
        return function(*words)
    return called

{patch}
main()
"""
LOADS = {
    "read": "admin.verify_weights = slow(admin.verify_weights)",  # in a thread: they go on
    "install": "Engine._install_weights = slow(Engine._install_weights)",  # between two steps: they wait
}


@pytest.mark.slow
@pytest.mark.parametrize("where", LOADS)
def test_a_load_of_a_minute_is_held_against_no_engine(chat_model, make_model, tmp_path, where):
    new = publish(make_model("qwen3", seed=3), tmp_path, 1)
    program = ("-c", SLOW_LOAD.format(patch=LOADS[where]))
    reported = []

    async def main(urls):
        client = InferenceClient(
            urls,
            api_key=None,
            timeout=HANG,
            model=str(chat_model.directory),
            heartbeat_timeout=5.0,
            on_broken=lambda *report: reported.append(report),
        )
        async with client:
            await client.wait_ready(HANG)
            generations = await played_through(client, bring(client, new, 1))
            return generations, client.metrics()

    with started(chat_model, tmp_path / "a", tmp_path / "b", program=program) as servers:
        generations, metrics = asyncio.run(main([server.url for server in servers]))
        assert all(server.process.poll() is None for server in servers)
    assert all(len(generation.token_ids) == PARAMS.max_tokens for generation in generations)
    assert {generation.versions[-1] for generation in generations[-PLAYERS:]} == {1}
    assert not reported
    assert_nobody_suspected(metrics)
