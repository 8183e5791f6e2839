"""A rollout as a tree: for any requests in any order, every sampled token is trained exactly once."""

import asyncio
import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.base import CallOptions
from buckeye.errors import UsageError
from buckeye.inference.client import Generation
from buckeye.inference.render import ChatRenderer
from tests.inference.chat_families import FAMILIES, save_family

from .fakes import FakeEngine, make_policy

ASK = {"role": "user", "content": "a"}


class Numbered:
    """Engine whose calls all sample different token ids, after a pause that shuffles concurrent requests."""

    def __init__(self, ordinary, end):
        self.ordinary, self.end = ordinary, end
        self.answers = []

    async def generate(self, prompt_ids, params):
        number = len(self.answers)
        first, second = divmod(number, len(self.ordinary))
        ids = [self.ordinary[first], self.ordinary[second], self.end]
        self.answers.append((list(prompt_ids), ids))
        await asyncio.sleep(0.0001 * (number * 7 % 5))
        return Generation(
            token_ids=ids,
            logprobs=[-(number + 1.0)] * len(ids),
            versions=[number] * len(ids),
            finish_reason="stop",
        )


def check_invariants(policy, answers):
    """Assert that segments hold each prompt and reply unchanged, and that each reply is trained once."""
    trained = []
    for segment in policy.segments:
        for token, mask, logprob, version, turn in zip(*lists_of(segment), strict=True):
            assert mask == (turn >= 0) == (version >= 0) == (logprob != 0.0)
            if mask:
                trained.append((token, logprob, version))
    assert sorted(trained) == sorted(
        (token, -(number + 1.0), number) for number, (_, ids) in enumerate(answers) for token in ids
    )
    for number, (prompt, ids) in enumerate(answers):
        holding = [s for s in policy.segments if number in s.versions]
        (segment,) = holding  # no other segment has a loss on the reply
        whole = [*prompt, *ids]
        assert segment.token_ids[: len(whole)].tolist() == whole
        assert segment.loss_mask[len(prompt) : len(whole)].tolist() == [True] * len(ids)
    assert policy.turns == len(answers)
    assert policy.turns_extended + len(policy.segments) == policy.turns


def lists_of(segment):
    columns = segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions, segment.turns
    return [column.tolist() for column in columns]


PLAN = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # index of the earlier conversation to continue
            st.integers(0, 3),  # how many of its messages are dropped first
            st.sampled_from(["a", "b"]),
        ),
        min_size=1,
        max_size=3,  # these requests are open at the same time
    ),
    min_size=1,
    max_size=5,
)


async def play(policy, plan):
    """Continue earlier conversations, completely or in part, several at a time."""
    conversations = [[]]
    for together in plan:
        asked = []
        for which, dropped, word in together:
            old = conversations[which % len(conversations)]
            kept = old[: max(0, len(old) - dropped)]
            asked.append([*kept, {"role": "user", "content": word}])
        replies = await asyncio.gather(*(policy.chat(messages) for messages in asked))
        for messages, reply in zip(asked, replies, strict=True):
            conversations.append([*messages, reply.message])


@given(plan=PLAN)
def test_every_token_is_trained_once_however_a_rollout_branches(plan):
    engine = Numbered([ord(c) for c in "cdefghijkl"], ord("$"))
    policy = make_policy(engine)
    asyncio.run(play(policy, plan))
    check_invariants(policy, engine.answers)


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory):
    return functools.cache(lambda family: ChatRenderer(save_family(family, tmp_path_factory.mktemp(family))))


@pytest.mark.slow
@given(plan=PLAN, family=st.sampled_from(sorted(FAMILIES)))
def test_every_token_is_trained_once_in_every_model_family(renderer_of, plan, family):
    renderer = renderer_of(family)
    ordinary = [renderer.encode(c)[0] for c in "cdefghijkl"]
    engine = Numbered(ordinary, renderer.template.end_of_turn[1])
    policy = make_policy(engine, renderer)
    asyncio.run(play(policy, plan))
    check_invariants(policy, engine.answers)


def run(coroutine):
    return asyncio.run(coroutine)


def test_seeds_depend_on_the_prompt_and_not_on_order():
    async def seeds(order):
        engine = FakeEngine(delay=0.001)
        policy = make_policy(engine)
        await asyncio.gather(*(policy.chat([{"role": "user", "content": word}]) for word in order))
        return {"".join(map(chr, prompt)): params.seed for prompt, params in engine.calls}

    assert run(seeds("abc")) == run(seeds("cab"))
    assert len(set(run(seeds("abc")).values())) == 3


def test_prefilled_call_start_is_not_trained(renderer_of):
    renderer = renderer_of("qwen3")
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}

    class Engine:
        async def generate(self, prompt_ids, params):
            self.prompt = renderer.decode(prompt_ids.tolist())
            ids = [*renderer.encode(' {"word": "dog"}}\n</tool_call>'), renderer.template.end_of_turn[1]]
            n = len(ids)
            return Generation(token_ids=ids, logprobs=[-1.0] * n, versions=[0] * n, finish_reason="stop")

    async def ask():
        engine = Engine()
        policy = make_policy(engine, renderer)
        options = CallOptions(must_call=True, tool="find")
        reply = await policy.ask([ASK], tools=[tool], options=options)
        result = {"role": "tool", "tool_call_id": "call00000", "content": "found"}
        await policy.ask([ASK, reply.message, result], tools=[tool])
        return policy, reply, engine

    policy, reply, _ = run(ask())
    (call,) = reply.message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("find", '{"word": "dog"}')
    (segment,) = policy.segments
    before = segment.token_ids[: segment.loss_mask.argmax()]
    assert renderer.decode(before.tolist()).endswith('{"name": "find", "arguments":')
    assert (policy.turns, policy.turns_extended) == (2, 1)


def test_ids_that_the_tokenizer_does_not_have_are_refused():
    with pytest.raises(UsageError, match="vocabulary"):
        run(make_policy(FakeEngine()).complete([0x110000]))


def test_history_from_json_extends_the_segment():
    async def again(**other):
        policy = make_policy(FakeEngine())
        reply = (await policy.chat([ASK, ASK])).message
        history = [ASK, ASK | other, reply, ASK]
        await policy.chat(json.loads(json.dumps(history)))
        return policy

    assert run(again()).turns_extended == 1
    assert run(again(content="b")).turns_extended == 0


def test_token_ids_that_continue_earlier_ones_extend_the_segment():
    async def play():
        policy = make_policy(FakeEngine())
        await policy.complete([ord("a"), ord("b")])
        ids = list(policy.segments[0].token_ids)
        for more in ([], [ord("c")], [ord("d")]):  # two extend it at its end; the third branches
            await policy.complete([*ids, *more])
            ids = ids if more else list(policy.segments[0].token_ids)
        return policy

    policy = run(play())
    assert (len(policy.segments), policy.turns_extended, policy.turns_branched) == (2, 2, 1)
    one, other = policy.segments
    assert sum(one.loss_mask) == 3 * sum(other.loss_mask)
