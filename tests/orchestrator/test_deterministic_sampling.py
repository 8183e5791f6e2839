"""Waves: which requests are sent together, in which order, and that no reply is cut short."""

import asyncio
from types import SimpleNamespace

import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import InferenceError
from buckeye.inference.client import Generation, SamplingParams
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling, deterministic_sampling

pytestmark = pytest.mark.anyio


class Counting:
    """Engine that counts up from the last token and stops after a multiple of `stop`."""

    def __init__(self, stop=10**9):
        self.stop = stop
        self.waves = []

    async def generate_batch(self, prompts, params):
        self.waves.append(([list(p) for p in prompts], params))
        return [self._reply(prompt[-1], params.max_tokens) for prompt in prompts]

    def _reply(self, last, most):
        ids = []
        while len(ids) < most and not (ids and ids[-1] % self.stop == 0):
            ids.append(last + len(ids) + 1)
        ended = ids[-1] % self.stop == 0
        return Generation(
            token_ids=ids,
            logprobs=[-float(i) for i in ids],
            versions=[3] * len(ids),
            finish_reason="stop" if ended else "length",
        )


def ask(client, requests, *, order=None, seed=1):
    """Return the replies to (prompt, max_tokens, min_tokens) requests, sent one after another in `order`."""

    async def play():
        deterministic = DeterministicSampling(client)
        deterministic.begin(seed)
        participants = [deterministic.join(i) for i in range(len(requests))]
        replies = [None] * len(requests)
        for i in order or range(len(requests)):
            prompt, most, least = requests[i]
            params = SamplingParams(max_tokens=most, min_tokens=least, seed=i)
            replies[i] = asyncio.create_task(participants[i].generate(prompt, params))
            await asyncio.sleep(0)
        return await asyncio.gather(*replies, return_exceptions=True)

    return asyncio.run(play())


def test_similar_limits_share_a_batch_and_cut_replies_continue():
    client = Counting(stop=100)
    replies = ask(client, [([95], 20, 18), ([200], 22, 18), ([300], 23, 18)])
    assert [r.token_ids for r in replies] == [
        [96, 97, 98, 99, 100],
        [*range(201, 223)],
        [*range(301, 324)],
    ]
    assert [r.finish_reason for r in replies] == ["stop", "length", "length"]
    assert replies[2].logprobs == [-float(i) for i in range(301, 324)]
    assert replies[2].versions == [3] * 23
    sent = [(prompts, params.max_tokens, params.min_tokens) for prompts, params in client.waves]
    assert sent == [
        ([[95], [200], [300]], 20, 18),
        ([[200, *range(201, 221)]], 2, 0),
        ([[300, *range(301, 321)]], 3, 0),
    ]
    seeds = [params.seed for _, params in client.waves]
    assert len(set(seeds)) == 3


def test_reply_with_little_room_gets_a_separate_batch():
    client = Counting()
    replies = ask(client, [([1], 1000, 0), ([2], 3, 0), ([3], 1010, 0)])
    assert [len(r.token_ids) for r in replies] == [1000, 3, 1010]
    assert [params.max_tokens for _, params in client.waves] == [1000, 3, 10]


def test_batches_are_independent_of_request_order():
    requests = [([1], 40, 0), ([2], 41, 0), ([3], 5, 0), ([4], 43, 0)]
    first, second = Counting(), Counting()
    assert ask(first, requests) == ask(second, requests, order=[3, 1, 0, 2])
    assert first.waves == second.waves


async def test_cancelled_request_is_not_sent():
    client = Counting()
    deterministic = DeterministicSampling(client)
    deterministic.begin(1)
    first, second = deterministic.join(0), deterministic.join(1)
    params = SamplingParams(max_tokens=2, min_tokens=0, seed=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await first.generate([10], params)
    again = asyncio.create_task(first.generate([20], params))
    await asyncio.sleep(0.01)
    assert client.waves == []  # the second has not sent its request yet
    async with asyncio.timeout(5):
        replies = await asyncio.gather(again, second.generate([30], params))
    assert [prompts for prompts, _ in client.waves] == [[[20], [30]]]
    assert [r.token_ids for r in replies] == [[21, 22], [31, 32]]


def test_failed_batch_fails_only_its_replies():
    class Fails(Counting):
        async def generate_batch(self, prompts, params):
            if params.max_tokens == 3:
                raise InferenceError("gone")
            return await super().generate_batch(prompts, params)

    good, bad = ask(Fails(), [([1], 100, 0), ([2], 3, 0)])
    assert len(good.token_ids) == 100
    with pytest.raises(InferenceError, match="gone"):
        raise bad


def test_concurrent_requests_of_one_rollout_share_a_batch():
    async def play(last):
        client = Counting()
        deterministic = DeterministicSampling(client)
        deterministic.begin(1)
        participants = [deterministic.join(0), deterministic.join(1)]
        prompts = {0: [[1], [1], [1]], 1: [[2]]}
        asking = []
        for participant in (1 - last, last):
            params = SamplingParams(max_tokens=2)
            asking += [
                asyncio.create_task(participants[participant].generate(prompt, params))
                for prompt in prompts[participant]
            ]
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            await asyncio.gather(*asking)
        return [prompts for prompts, _ in client.waves]

    for last in (0, 1):
        assert asyncio.run(play(last)) == [[[1], [1], [1], [2]]]


@pytest.mark.parametrize(
    ("level", "asked", "are_vllm", "waves"),
    [
        (0, None, [False, False], True),
        (0, None, [False, True], False),
        (0, False, [False], False),
        (0, True, [True], True),
        (1, None, [False], False),
        (1, False, [False], False),
    ],
)
def test_deterministic_sampling_is_used_where_reproducible(level, asked, are_vllm, waves):
    config = OrchestratorConfig(max_async_level=level, deterministic=asked)
    client = SimpleNamespace(replicas=[SimpleNamespace(is_vllm=is_vllm) for is_vllm in are_vllm])
    assert (deterministic_sampling(config, client) is not None) is waves
