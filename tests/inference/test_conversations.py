"""Conversations with reasoning and tools, per model family: the trained tokens are the sampled tokens."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buckeye.inference.client import Generation, InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.orchestrator.policy import RecordingPolicy
from tests.waiting import HANG

from .chat_families import FAMILIES, save_family
from .conftest import LOGPROB_ERROR
from .scripted_model import CALL, FIND, call_of

QUESTION = {"role": "user", "content": "Which animal jumps?"}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "find", "content": "an animal"}
MALFORMED = "<tool_call>\n{'name': find}\n</tool_call>"


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    return {name: ChatRenderer(save_family(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


def reply(renderer, text, *, tools=(FIND,), messages=(QUESTION,), ended=True):
    """Return the assistant message parsed from a sampled text."""
    conversation = renderer.render(messages, tools)
    ids = renderer.encode(text) + ([renderer.template.end_of_turn[1]] if ended else [])
    return renderer.parse(conversation, ids)


def calls(message):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]


@pytest.mark.parametrize(
    ("family", "library"), [("qwen3", "qwen3"), ("llama3", "llama-3"), ("qwen2.5", None)]
)
def test_family_is_found_by_its_template(renderers, family, library):
    found = renderers[family].family
    assert (found and found.name) == library


def test_fine_tune_with_another_template_has_no_family(tmp_path):
    template = "{{ 'Hello! ' }}" + (save_family("qwen3", tmp_path) / "chat_template.jinja").read_text()
    renderer = ChatRenderer(save_family("qwen3", tmp_path, template))
    assert renderer.family is None
    assert calls(reply(renderer, CALL)) == [("find", '{"word": "dog"}')]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read(renderers, family):
    renderer = renderers[family]
    message = reply(renderer, call_of(renderer))
    assert message["content"] == ""
    (call,) = message["tool_calls"]
    assert (call["id"], call["type"]) == ("call00000", "function")
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"word": "dog"}


@pytest.mark.parametrize(
    "family", ["qwen2.5", "qwen3", "smollm2", "default", "coder", "lfm2", "mistral", "ministral"]
)
def test_text_around_calls_is_content(renderers, family):
    renderer = renderers[family]
    message = reply(renderer, f"I look.\n{call_of(renderer)}\n{call_of(renderer, odd=True)}")
    assert message["content"].strip() == "I look."
    assert [(name, json.loads(arguments)) for name, arguments in calls(message)] == [
        ("find", {"word": "dog"})
    ] * 2
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "smollm2", "default"])
@pytest.mark.parametrize(
    "written",
    ["{'name': find}", '{"arguments": {}}', "[1]", '"find"', '{"name": 3, "arguments": {}}', "", "[" * 5000],
)
def test_unreadable_call_is_data(renderers, family, written):
    for text, ended in ((f"{written}\n</tool_call>", True), (written, False)):  # complete, and cut off
        (call,) = calls(reply(renderers[family], f"<tool_call>\n{text}", ended=ended))
        assert call == ("", written)


_MIX = {
    "type": "function",
    "function": {
        "name": "mix",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer"},
                "fast": {"type": "boolean"},
                "parts": {"type": "array"},
                "note": {"type": "string"},
            },
        },
    },
}
_VALUES = {"count": 3, "fast": True, "parts": ["a", 1], "note": "3\n4"}
_XML = (
    "<function=mix><parameter=count>3</parameter><parameter=fast>\nTrue\n</parameter>"
    '<parameter=parts>["a", 1]</parameter><parameter=note>\n3\n4\n</parameter></function>'
)
_CALL_OF_PYTHON = "mix(count=3, fast=True, parts=['a', 1], note='3\\n4')"


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("coder", f"<tool_call>{_XML}</tool_call>", [("mix", _VALUES)]),
        ("coder", f"<tool_call>{_XML}{_XML}", [("mix", _VALUES)] * 2),
        ("coder", '<tool_call>{"name": "find", "arguments": {}}</tool_call>', None),
        ("coder", _XML, []),
        ("pythonic", f"[{_CALL_OF_PYTHON}, find(word='dog')]", [("mix", _VALUES), ("find", {"word": "dog"})]),
        ("pythonic", f"I call [{_CALL_OF_PYTHON}]", []),
        ("pythonic", f"[{_CALL_OF_PYTHON}] is it.", []),
        ("pythonic", "[find('dog')]", []),
        ("pythonic", "[find(word=open('x'))]", []),
        ("lfm2", "<|tool_call_start|>[find(word=open('x'))]<|tool_call_end|>", None),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}, 3]', None),
        ("mistral", '[{"name": "find", "arguments": {}}]', []),
        ("ministral", "[TOOL_CALLS]find[ARGS]dog", None),
        ("llama3", "[find(word='dog')]", []),
        ("qwen2.5", _XML, []),
    ],
)
def test_calls_are_read_only_in_the_form_of_the_template(renderers, family, text, expected):
    """None: one call that cannot be read, with its text."""
    found = calls(reply(renderers[family], text, tools=(FIND, _MIX)))
    if expected is None:
        assert [name for name, _ in found] == [""]
        assert found[0][1] in text
    else:
        assert [(name, json.loads(arguments)) for name, arguments in found] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_a_call_is_text(renderers, family):
    renderer = renderers[family]
    assert reply(renderer, call_of(renderer), tools=()) == {"role": "assistant", "content": call_of(renderer)}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_numbered_through_the_conversation(renderers, family):
    renderer = renderers[family]
    first = reply(renderer, call_of(renderer))
    second = reply(renderer, call_of(renderer), messages=(QUESTION, first, RESULT))
    assert second["tool_calls"][0]["id"] == "call00001"


def test_reasoning_is_separate_if_the_template_renders_it(renderers):
    text = "<think>\nA fox, perhaps.\n</think>\n\nThe fox."
    assert reply(renderers["qwen3"], text, tools=()) == {
        "role": "assistant",
        "content": "The fox.",
        "reasoning_content": "A fox, perhaps.",
    }
    assert reply(renderers["qwen2.5"], text, tools=()) == {"role": "assistant", "content": text}


def test_reasoning_opened_by_the_template_is_parsed(tmp_path):
    template = (save_family("qwen3", tmp_path) / "chat_template.jinja").read_text()
    opened = template.replace(
        '"<|im_start|>assistant\\n" -}}\n{%- if enable',
        '"<|im_start|>assistant\\n<think>\\n" -}}\n{%- if enable',
    )
    assert opened != template
    renderer = ChatRenderer(save_family("qwen3", tmp_path, opened))
    assert renderer.render([QUESTION]).text.endswith("<think>\n")
    message = reply(renderer, "A fox?\n</think>\n\nThe fox.", tools=())
    assert (message["reasoning_content"], message["content"]) == ("A fox?", "The fox.")
    message = reply(renderer, "A fox, or", tools=(), ended=False)
    assert (message["reasoning_content"], message["content"]) == ("A fox, or", "")


@pytest.mark.parametrize("family", ["smollm2", "default"])
def test_tools_are_plain_messages_if_the_template_has_none(renderers, family, wording):
    renderer = renderers[family]
    called = reply(renderer, CALL)
    text = renderer.render([SYSTEM, QUESTION, called, RESULT, RESULT], [FIND]).text
    system, rest = text.split("<|im_end|>\n<|im_start|>user\nWhich animal jumps?")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(FIND) in system
    assert rest == wording


class ScriptedEngine:
    """Engine that returns scripted answers and records every prompt and answer."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.prompts = []
        self.sampled = []

    async def generate(self, prompt_ids, params):
        self.prompts.append(list(prompt_ids))
        ids, reason = self.answers[len(self.sampled)]
        self.sampled.append(ids)
        return Generation(
            token_ids=ids, logprobs=[-0.25] * len(ids), versions=[3] * len(ids), finish_reason=reason
        )


def replies_of(renderer, *texts):
    """Return answers with these texts that end with the end-of-turn token."""
    return [([*renderer.encode(text), renderer.template.end_of_turn[1]], "stop") for text in texts]


async def converse(renderer, answers, follow_ups, tools=(FIND,)):
    """Run a conversation: each tool call gets a result, each other turn the user's next follow-up."""
    engine = ScriptedEngine(answers)
    policy = RecordingPolicy(
        sampler=engine, renderer=renderer, params=SamplingParams(max_tokens=1000), seq_len=100_000, seed=0
    )
    messages = [QUESTION]
    replies = []
    for follow_up in follow_ups:
        answer = await policy.chat(messages, tools=tools)
        replies.append(answer.message)
        messages.append(answer.message)
        for call in answer.message.get("tool_calls", ()):
            name = call["function"]["name"] or "unknown"
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": follow_up})
        if not answer.message.get("tool_calls"):
            messages.append({"role": "user", "content": follow_up})
    return engine, policy, replies


def check_tokens(engine, policy):
    """Assert that trained ids equal sampled ids, and that segments hold only prompts and answers."""
    turn = 0
    for segment in policy.segments:
        assert (
            len(segment.token_ids) == len(segment.loss_mask) == len(segment.logprobs) == len(segment.versions)
        )
        position = 0
        while position < len(segment.token_ids):
            prompt, sampled = engine.prompts[turn], engine.sampled[turn]
            end = len(prompt) + len(sampled)
            assert segment.token_ids[:end].tolist() == prompt + sampled
            assert not any(segment.loss_mask[position : len(prompt)])
            assert all(segment.loss_mask[len(prompt) : end])
            position, turn = end, turn + 1
    assert turn == len(engine.sampled) == policy.turns
    assert policy.turns_extended + policy.turns_branched == policy.turns - 1
    for masked, logprob, version in (
        entry for s in policy.segments for entry in zip(s.loss_mask, s.logprobs, s.versions, strict=True)
    ):
        assert (logprob, version) == ((-0.25, 3) if masked else (0.0, -1))


words = st.text(alphabet="abc dog{}\":,'\n<>/ŋš", max_size=12)


@st.composite
def sampled_answers(draw, renderer, kinds):
    """Draw the token ids of a reply, not necessarily those of the tokenizer, and its finish reason."""
    kind = draw(st.sampled_from(kinds))
    if kind == "tokens":
        ordinary = [
            i for i in range(len(renderer.tokenizer)) if i not in renderer.tokenizer.added_tokens_decoder
        ]
        ids = draw(st.lists(st.sampled_from(ordinary), max_size=8))
    elif kind == "any tokens":
        stops = renderer.stop_token_ids
        ids = draw(
            st.lists(
                st.sampled_from([i for i in range(len(renderer.tokenizer)) if i not in stops]), max_size=8
            )
        )
    else:
        thought = f"<think>\n{draw(words)}x\n</think>\n\n" if kind.startswith("thought") else ""
        body = {
            "call": call_of(renderer),
            "odd": call_of(renderer, odd=True),
            "malformed": MALFORMED,
            "text": draw(words),
        }[kind.removeprefix("thought ")]
        text = thought + body
        cut = draw(st.integers(len(thought), len(text)))  # tokenized in two pieces, as a sampler may do
        ids = renderer.encode(text[:cut]) + renderer.encode(text[cut:])
    if draw(st.booleans()):
        return ids, "length"
    return [*ids, renderer.template.end_of_turn[1]], "stop"


KINDS = ("call", "odd", "malformed", "text")
SAMPLED = [*KINDS, *(f"thought {kind}" for kind in KINDS)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_trained_ids_equal_any_sampled_ids(renderers, family, data):
    """Without control tokens, only Qwen3 branches: its template drops reasoning at the next user message."""
    renderer = renderers[family]
    control = data.draw(st.booleans())
    kinds = [*SAMPLED, "any tokens" if control else "tokens"]
    count = data.draw(st.integers(1, 6))
    answers = [data.draw(sampled_answers(renderer, kinds)) for _ in range(count)]
    follow_ups = [data.draw(words) for _ in range(count)]
    tools = data.draw(st.sampled_from([(FIND,), ()]))
    engine, policy, replies = asyncio.run(converse(renderer, answers, follow_ups, tools))
    check_tokens(engine, policy)
    branches, thought = 0, False
    for message in replies[:-1]:
        thought = thought or bool(message.get("reasoning_content"))
        if not message.get("tool_calls"):  # a user message follows
            branches += thought
            thought = False
    if not control:
        assert policy.turns_branched == (branches if family == "qwen3" else 0)


def test_extend_notices_dropped_reasoning_that_the_answer_repeats(renderers):
    """Qwen3 drops the reasoning. The conversation must branch even if the answer contains the same text."""
    renderer = renderers["qwen3"]
    answers = replies_of(renderer, "<think>\n4\n</think>\n\nThe answer is 4.", "Yes.")
    _, policy, _ = asyncio.run(converse(renderer, answers, ["Sure?", "Bye."]))
    assert (policy.turns_extended, policy.turns_branched) == (0, 1)


def test_follow_up_prompts_equal_fresh_renderings(renderers):
    """If replies are canonical, the verbatim continuation equals the template's own rendering."""
    for family, renderer in renderers.items():
        answers = replies_of(renderer, call_of(renderer), "The fox.", "Yes.")
        engine, policy, replies = asyncio.run(converse(renderer, answers, ["an animal", "Is it?", "Bye."]))
        asked = {"role": "user", "content": "Is it?"}
        whole = renderer.render([QUESTION, replies[0], RESULT, replies[1], asked], [FIND])
        assert renderer.decode(engine.prompts[2]) == whole.text, family
        assert policy.turns_branched == 0, family


def test_rewritten_history_starts_a_new_branch(renderers):
    async def play(renderer):
        engine = ScriptedEngine(replies_of(renderer, "The fox.", "Yes.", "No."))
        policy = RecordingPolicy(
            sampler=engine, renderer=renderer, params=SamplingParams(max_tokens=100), seq_len=10_000, seed=0
        )
        reply = await policy.chat([QUESTION])
        reply.message["content"] = "The dog."  # in place
        await policy.chat([QUESTION, reply.message, QUESTION])
        await policy.chat([QUESTION])
        return engine, policy

    for renderer in renderers.values():
        engine, policy = asyncio.run(play(renderer))
        check_tokens(engine, policy)
        assert (policy.turns_extended, policy.turns_branched) == (0, 2)


def test_equivalent_json_of_a_call_is_not_a_rewrite(renderers):
    """An environment may parse the arguments or rebuild the message without changing its content."""
    for renderer in renderers.values():
        conversation = renderer.render([QUESTION], [FIND])
        ((sampled, _),) = replies_of(renderer, call_of(renderer, odd=True))
        message = renderer.parse(conversation, sampled)
        function = message["tool_calls"][0]["function"]
        message["tool_calls"][0]["function"] = {**function, "arguments": json.loads(function["arguments"])}
        extended = renderer.extend(conversation, sampled, [QUESTION, message, RESULT], [FIND])
        assert extended.ids[: len(conversation.ids) + len(sampled)] == conversation.ids + sampled


def test_log_probs_of_a_conversation_are_those_of_its_tokens(chat_model, server):
    """Three turns on a real engine agree with one forward pass of the reference over the recorded tokens."""
    renderer = ChatRenderer(chat_model.directory)

    async def play():
        client = InferenceClient(
            [server.url], api_key=server.key, timeout=HANG, model=str(chat_model.directory)
        )
        async with client:
            policy = RecordingPolicy(
                sampler=client, renderer=renderer, params=SamplingParams(max_tokens=12), seq_len=150, seed=4
            )
            messages = [{"role": "user", "content": "the dog?"}]
            for _ in range(3):
                messages += [(await policy.chat(messages)).message, {"role": "user", "content": "?"}]
            return policy

    policy = asyncio.run(play())
    (segment,) = policy.segments
    assert (policy.turns_extended, policy.turns_branched, sum(segment.loss_mask) > 3) == (2, 0, True)
    expected = chat_model.logprobs(segment.token_ids[:1], segment.token_ids[1:])
    pairs = zip(expected.tolist(), segment.logprobs[1:], segment.loss_mask[1:], strict=True)
    assert all(abs(want - got) < LOGPROB_ERROR for want, got, sampled in pairs if sampled)
