"""Agents that are unaware of training, with the clients they normally use: each token is captured once."""

import asyncio
import functools

import pytest
from tests.inference.chat_families import FAMILIES, save_family
from tests.inference.scripted_model import call_of

from buckeye.inference.render import ChatRenderer
from buckeye.workers.proxy import serve

from .players import anthropic_agent, chat_agent, openai_of, responses_agent, scripted

pytestmark = pytest.mark.anyio

AGENTS = {
    "chat": chat_agent,
    "responses": responses_agent,
    "messages": anthropic_agent,
}
WAYS = [
    ("chat", {}),
    ("chat", {"stream": True}),
    ("responses", {}),
    ("responses", {"stream": True}),
    ("responses", {"remembers": True}),
    ("messages", {}),
    ("messages", {"stream": True}),
]


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory):
    return functools.cache(lambda family: ChatRenderer(save_family(family, tmp_path_factory.mktemp(family))))


OTHERS = (pytest.param(one, marks=pytest.mark.slow) for one in sorted(FAMILIES) if one != "qwen3")


@pytest.mark.parametrize("family", ["qwen3", *OTHERS])
@pytest.mark.parametrize(("agent", "options"), WAYS)
def test_a_conversation_with_tools_is_one_sample(renderer_of, family, agent, options):
    renderer = renderer_of(family)
    call = call_of(renderer, odd=True)
    thought = "<think>\nI should look.\n</think>\n\n" if renderer.template.supports_reasoning else ""
    policy, engine = scripted(renderer, [thought + call, thought + call, thought + "The dog."])

    async def play():
        async with serve(policy) as endpoint:
            return await AGENTS[agent](endpoint, **options), endpoint.usage

    text, usage = asyncio.run(play())
    assert text == "The dog."
    assert (usage.turns, usage.stop_reason, usage.failure) == (3, None, None)
    assert (policy.turns, policy.turns_extended, policy.turns_branched) == (3, 2, 0)
    (segment,) = policy.segments
    sampled = [t for t, mask in zip(segment.token_ids.tolist(), segment.loss_mask, strict=True) if mask]
    assert sampled == [t for answer in engine.answers for t in answer]
    for prompt, answer in zip(engine.prompts, engine.answers, strict=True):
        assert segment.token_ids[: len(prompt) + len(answer)].tolist() == prompt + answer
    assert "dog was found" in renderer.decode(engine.prompts[1])


async def test_unreadable_call_becomes_text_and_the_conversation_continues(renderer_of):
    renderer = renderer_of("qwen2.5")
    written = "<tool_call>\n{'name': find}\n</tool_call>"
    policy, _ = scripted(renderer, [f"I look.\n{written}", "The dog."])
    async with serve(policy) as endpoint:
        found = await chat_agent(endpoint)
    assert found == f"I look.\n{written}"


async def test_an_agent_that_forgets_its_history_begins_a_sample(renderer_of):
    renderer = renderer_of("qwen2.5")
    policy, engine = scripted(renderer, ["One.", "Two.", "Three."])
    async with serve(policy) as endpoint, openai_of(endpoint) as client:
        ask = {"role": "user", "content": "Go on."}
        messages = [ask]
        for turn in range(3):
            made = await client.chat.completions.create(model="x", messages=messages)
            messages += [made.choices[0].message, ask]
            if turn == 1:  # it replaces the conversation by a summary
                messages = [{"role": "user", "content": "One and two came before."}, ask]
    assert (policy.turns, policy.turns_extended, policy.turns_branched) == (3, 1, 1)
    trained = [s.token_ids[s.loss_mask].tolist() for s in policy.segments]
    assert trained == [engine.answers[0] + engine.answers[1], engine.answers[2]]
