"""Servers under load are not dead: thousands of requests at once, and slow weight loads during traffic."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace

import pytest

from .test_client import GENERATE, IDS
from .test_replicas import PARAMS, another_replica, one_replica, slow, update, watching

__all__ = ["another_replica", "one_replica"]

pytestmark = pytest.mark.anyio

PLAYERS = 8


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
async def test_weight_load_longer_than_a_heartbeat_keeps_the_server(a, b, tmp_path, owner):
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
