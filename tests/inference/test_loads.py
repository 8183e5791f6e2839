"""Servers under load are not dead: thousands of requests at once, and slow weight loads during traffic."""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from buckeye.base.process import raise_open_files_limit
from buckeye.inference.client import InferenceClient, fleet
from buckeye.orchestrator.environments import NamedEnvironment, RolloutSettings
from buckeye.transport.weights import read_weights_manifest
from tests.orchestrator.fakes import LetterEnvironment, make_runner

from .conftest import Server
from .test_client import GENERATE, IDS
from .test_replicas import PARAMS, another_replica, one_replica, slow, update, watching
from .test_server import publish

__all__ = ["another_replica", "one_replica"]

pytestmark = pytest.mark.anyio

PLAYERS = 8
SLOW_LOAD = """
import time
from buckeye.cli.main import main
from buckeye.inference.engine.engine import Engine
install = Engine._install_weights
Engine._install_weights = lambda *args: time.sleep({seconds}) or install(*args)
main()
"""


async def test_broken_connection_to_a_live_server_is_retried(a):
    """The operating system of a busy server resets some connections; the client only retries requests."""
    async with watching([a]) as client:
        answer = a.answers[GENERATE]
        a.answers[GENERATE] = lambda body: None if a.calls[GENERATE] <= 7 else answer(body)
        await asyncio.gather(*(client.generate([i], PARAMS) for i in range(40)))
        metrics = client.metrics()
    assert Counter(prompt[0] for prompt in a.prompts) == Counter(range(40))
    assert metrics["inference/requeued"] == 7
    assert metrics["inference/0/failures"] == 0


async def test_broken_connection_to_a_silent_server_takes_it_out(a, b):
    async with watching([a, b]) as client:
        a.answers |= dict.fromkeys(a.answers, lambda _: None)
        await asyncio.gather(*(client.generate([i], PARAMS) for i in range(40)))
        metrics = client.metrics()
    assert Counter(prompt[0] for prompt in b.prompts) == Counter(range(40))
    assert (metrics["inference/0/failures"], metrics["inference/1/failures"]) == (1, 0)


async def test_requests_beyond_the_connections_wait_in_order_without_a_timeout(a):
    a.max_num_seqs = 4
    answer = a.answers[GENERATE]
    a.answers[GENERATE] = lambda body: slow(answer, 0.1)(body)
    async with watching([a], timeout=1.5) as client:
        sessions = [client.session() for _ in range(100)]
        calls = [asyncio.create_task(s.generate([i], PARAMS)) for i, s in enumerate(sessions)]
        await asyncio.sleep(0)
        assert client.metrics()["inference/queued"] == 95
        await sessions[99].abort()
        generations = await asyncio.gather(*calls)
        assert client.metrics()["inference/queued"] == 0
    assert [g.finish_reason for g in generations] == ["stop"] * 99 + ["abort"]
    assert Counter(prompt[0] for prompt in a.prompts) == Counter(range(99))


async def played_through(client, updating):
    """Run rollouts in `PLAYERS` loops until the update ends, then one more each; return the generations."""
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
    """Block the fake's other answers while it loads weights for the given seconds."""
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


@pytest.mark.parametrize("owner", ["buckeye", "vllm"])
async def test_weight_load_longer_than_a_heartbeat_keeps_the_server(a, b, tmp_path, owner, monkeypatch):
    monkeypatch.setattr(fleet, "_HEARTBEAT_SECONDS", 0.1)
    reported = []
    for fake in (a, b):
        fake.answers["/v1/models"] = (200, {"data": [{"id": "m", "owned_by": owner}]})
        slow_updates(fake, 1.0)
    settings = {"heartbeat_timeout": 0.2, "on_restart_needed": lambda *report: reported.append(report)}
    async with watching([a, b], **settings) as client:
        generations = await played_through(client, update(client, tmp_path, 5, None))
        metrics = client.metrics()
    assert len(a.prompts) + len(b.prompts) == len(generations)
    assert {generation.versions[0] for generation in generations[-PLAYERS:]} == {5}
    assert not reported
    assert metrics["inference/requeued"] == 0
    assert {metrics[f"inference/{i}/{what}"] for i in range(2) for what in ("failures", "restarts")} == {0}


@pytest.mark.parametrize("keeps", [False, True])
async def test_vllm_pauses_only_to_load_verified_weights(a, tmp_path, keeps):
    """The pause states whether keys and values of running requests are recomputed."""
    a.answers["/v1/models"] = (200, {"data": [{"id": "m", "owned_by": "vllm"}]})
    order, rpc = [], a.answers["/collective_rpc"]

    def workers(body):
        if json.loads(body)["method"] != "buckeye_verify":
            return rpc(body)
        order.append("verify")
        return 200, {"results": [None if len(order) < 3 else ""]}

    a.answers["/collective_rpc"] = workers
    a.answers["/pause"] = lambda _: (400, {})
    clears = "false" if keeps else "true"
    a.answers[f"/pause?mode=keep&clear_cache={clears}"] = lambda _: order.append("pause") or (200, {})
    async with watching([a], keep_kv_cache=keeps) as client:
        await update(client, tmp_path, 5, None)
    assert order == ["verify", "verify", "verify", "pause"]


@pytest.mark.parametrize("keeps", [False, True])
async def test_embedded_engine_gets_the_setting_for_the_cache(a, tmp_path, keeps):
    bodies, finish = [], a.answers["/finish_weight_update"]
    a.answers["/finish_weight_update"] = lambda body: bodies.append(json.loads(body)) or finish(body)
    async with watching([a], keep_kv_cache=keeps) as client:
        await update(client, tmp_path, 5, None)
    assert [body["keep_kv_cache"] for body in bodies] == [keeps]


async def test_waiting_for_a_slot_does_not_count_as_time_of_a_rollout(a):
    environment = NamedEnvironment(
        name="letters", environment=LetterEnvironment(), rollout_settings=RolloutSettings()
    )
    (task, *_) = environment.environment.tasks("train")
    async with watching([a]) as client:
        a.healthy = False
        client.replicas[0].exclude("it is being tested")
        running = make_runner(client, timeout=2.0).start(environment, task, 0)
        await asyncio.sleep(2.5)
        a.healthy = True
        rollout = await running
    assert rollout.outcome.error is None


@pytest.mark.slow
async def test_8192_rollouts_and_a_weight_load_of_a_minute_keep_the_engine(chat_model, make_model, tmp_path):
    """Between two decode steps, the engine loads weights for longer than the default heartbeat timeout."""
    raise_open_files_limit()
    number, seconds, reported, turns = 8192, 65, [], []
    new = publish(make_model("qwen3", seed=3), tmp_path, 1)
    program = ("-c", SLOW_LOAD.format(seconds=seconds))

    async def rollout(client, number):
        session, ids = client.session(), [*IDS, number % 100]
        for turn in range(2):
            params = replace(PARAMS, seed=2 * number + turn, max_tokens=16)
            generation = await session.generate(ids, params)
            turns.append((number, turn, set(generation.versions)))
            ids += generation.token_ids

    settings = {"timeout": 1200, "model": str(chat_model.directory)}
    settings["on_restart_needed"] = lambda *report: reported.append(report)
    with Server(chat_model.directory, tmp_path / "server", program=program) as server:
        async with InferenceClient([server.url], api_key=server.key, **settings) as client:
            await client.wait_ready(60)
            began = time.monotonic()
            rollouts = [asyncio.create_task(rollout(client, i)) for i in range(number)]
            while len(turns) < number // 8:
                await asyncio.sleep(0.05)
            loading = time.monotonic()
            await client.update_weights(new, 1, read_weights_manifest(new).checksum)
            loaded = time.monotonic()
            await asyncio.gather(*rollouts)
            metrics = client.metrics()
            print(f"load {loaded - loading:.0f} s, all {time.monotonic() - began:.0f} s, {metrics}")
        assert server.process.poll() is None
    assert loaded - loading > seconds
    assert Counter(turn[:2] for turn in turns) == Counter((i, turn) for i in range(number) for turn in (0, 1))
    assert {version for *_, versions in turns for version in versions} == {0, 1}
    assert reported == []
    assert metrics["inference/up"] == 1
    assert metrics["inference/requeued"] == 0
    assert metrics["inference/0/failures"] == metrics["inference/0/restarts"] == 0
