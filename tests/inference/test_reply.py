"""Incremental parsing of replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.renderer import call_start
from buckeye.inference.server.streaming_reply import StreamingReplyParser

from .chat_families import FAMILIES, save_family
from .scripted_model import ASK_DOG, CALL, FIND, call_of

BARE_CALL = '{"name": "find", "parameters": {"word": "dog"}}'


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    return {name: ChatRenderer(save_family(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


def read(renderer, pieces, *, tools=(FIND,), cut=None, first_call_only=False):
    """Return the parts parsed from each piece, and the whole reply: (reasoning, content, calls)."""
    reply = StreamingReplyParser(renderer, renderer.render(ASK_DOG, tools), first_call_only=first_call_only)
    parts = [reply.feed(piece) for piece in pieces[:-1]]
    parts.append(reply.finish(pieces[-1], renderer.encode("".join(pieces)), cut=cut))
    whole = (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [call["function"]["name"] for part in parts for call in part.calls],
    )
    return [(part.reasoning, part.content) for part in parts], whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["find", None])
def test_forced_call_is_parsed_with_its_start(renderers, family, name):
    """The prompt holds the opening of the call; the sampled rest completes it, in every family's format."""
    renderer = renderers[family]
    conversation = renderer.render(ASK_DOG, (FIND,))
    reply_start = call_start(renderer, conversation, name)
    assert renderer.decode(reply_start.ids) == reply_start.text
    text = call_of(renderer).removeprefix(renderer.template.call_format.start(name))
    assert len(text) < len(call_of(renderer)) - len(name or "")
    reply = StreamingReplyParser(renderer, conversation, reply_start=reply_start, first_call_only=True)
    parts = [reply.feed(text[:9]), reply.finish(text[9:], renderer.encode(text), cut=None)]
    assert [(part.reasoning, part.content) for part in parts] == [("", "")] * 2
    (call,) = parts[-1].calls
    assert call["function"] == {"name": "find", "arguments": '{"word": "dog"}'}


def test_content_is_streamed(renderers):
    parts, whole = read(renderers["qwen3"], ["It ", "is ", "a dog."])
    assert parts == [("", "It"), ("", " is"), ("", " a dog.")]  # a space may end before a call
    assert whole == ("", "It is a dog.", [])


def test_reasoning_is_streamed_without_markers(renderers):
    pieces = ["<thi", "nk>\nTwo", " and two.", "\n</th", "ink>\n", "\nFour", "."]
    parts, whole = read(renderers["qwen3"], pieces)
    assert parts == [
        ("", ""),
        ("Two", ""),
        (" and two.", ""),
        ("", ""),
        ("", ""),
        ("", "Four"),
        ("", "."),
    ]
    assert whole == ("Two and two.", "Four.", [])


def test_call_is_not_streamed_as_text(renderers):
    pieces = ["I look.", "\n<tool", "_call>\n", *CALL.removeprefix("<tool_call>\n")]
    parts, whole = read(renderers["qwen3"], pieces)
    assert parts[:3] == [("", "I look."), ("", ""), ("", "")]
    assert whole == ("", "I look.", ["find"])


def test_text_that_only_resembles_a_call_is_content(renderers):
    assert read(renderers["qwen3"], ["a <tool", "box>"])[1] == ("", "a <toolbox>", [])
    assert read(renderers["llama3"], ["{", '"a": 1}'])[1] == ("", '{"a": 1}', [])
    assert read(renderers["qwen3"], ["<tool_call>", "x"], tools=())[1] == ("", "<tool_call>x", [])


def test_a_bare_json_call(renderers):
    parts, whole = read(renderers["llama3"], list(BARE_CALL))
    assert set(parts) == {("", "")}
    assert whole == ("", "", ["find"])
    assert read(renderers["llama3"], ["It is ", BARE_CALL])[1] == ("", f"It is {BARE_CALL}", [])


def test_only_the_first_call_is_kept_without_parallel_calls(renderers):
    assert read(renderers["qwen3"], [CALL, CALL])[1][2] == ["find", "find"]
    assert read(renderers["qwen3"], [CALL, CALL], first_call_only=True)[1][2] == ["find"]


def test_call_after_a_stop_string_is_dropped(renderers):
    whole = read(renderers["qwen3"], ["I look. ", ""], cut="I look. ")[1]
    assert whole == ("", "I look. ", [])


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "tool_call>"]
PIECES = st.sampled_from([*MARKERS, "\n", " ", "x", "I look.", CALL, BARE_CALL])


@given(data=st.data())
def test_reply_does_not_depend_on_piece_sizes(renderers, data):
    renderer = renderers[data.draw(st.sampled_from(sorted(FAMILIES)))]
    tools = data.draw(st.sampled_from([(), (FIND,)]))
    text = "".join(data.draw(st.lists(PIECES, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    _, whole = read(renderer, [text], tools=tools)
    assert read(renderer, pieces, tools=tools)[1] == whole
    assert read(renderer, list(text) or [""], tools=tools)[1] == whole


WORDS = st.text("ab <>{\n", max_size=12)


@given(data=st.data())
def test_streamed_reply_equals_the_parsed_one(renderers, data):
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    renderer = renderers[family]
    tools = data.draw(st.sampled_from([(), (FIND,)]))
    text = data.draw(WORDS)
    if renderer.template.supports_reasoning and data.draw(st.booleans()):
        text = f"<think>\n{data.draw(WORDS)}\n</think>\n\n{text}"
    if tools and renderer.template.call_format.open and data.draw(st.booleans()):
        text += call_of(renderer) * data.draw(st.integers(1, 2))
    reasoning, content, calls = read(renderer, list(text) or [""], tools=tools)[1]
    message = renderer.parse(renderer.render(ASK_DOG, tools), renderer.encode(text))
    assert calls == [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert reasoning.strip() == (message.get("reasoning_content") or "").strip()
    assert content.strip() == message["content"].strip()
