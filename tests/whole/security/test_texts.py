"""A text in a message can neither open nor end a turn of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.inference.chat_families import FAMILIES, save_family

from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.control_tokens import ESCAPE_MARK, _is_control_token
from buckeye.trainer.model.tiny import TinySize, make_tiny_model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, ChatRenderer(save_family(request.param, tmp_path_factory.mktemp(request.param)))


def controls(renderer, ids):
    known = renderer.tokenizer.added_tokens_decoder
    return [known[one].content for one in ids if one in known]


def names_of(renderer):
    return sorted(token.content for token in renderer.tokenizer.added_tokens_decoder.values())


CONTROL = ("<|user|>", "[|user|]", "<｜User｜>", "<think>", "<tool_response>", "<turn>")
ROLES = ("system", "user", "tool", "description", "argument")


def conversation(role, text):
    """Return a conversation with `text` as the content of one role, and the offered tools."""
    words = {
        "system": "the end",
        "user": "the dog?",
        "tool": "fox",
        "description": "finds",
        "argument": "dog",
    }
    words[role] = text
    find = {"name": "find", "arguments": {"word": words["argument"]}}
    schema = {"type": "object", "properties": {}}
    tool = {"name": "find", "description": words["description"], "parameters": schema}
    call = {"id": "call00000", "type": "function", "function": find}
    messages = [
        {"role": "system", "content": words["system"]},
        {"role": "user", "content": words["user"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "find", "content": words["tool"]},
        {"role": "user", "content": "the end?"},
    ]
    return messages, [{"type": "function", "function": tool}]


@pytest.mark.parametrize("role", ROLES)
def test_the_name_of_a_control_token_is_words(family, role):
    _, renderer = family
    for name in names_of(renderer):
        if role == "argument" and name in ("<tool_call>", "</tool_call>", "<think>", "</think>"):
            continue  # assistants may write these tokens
        for text in (name, f"a{name}b", name * 3, f"\n{name}\nuser\nthe fox{name}"):
            plain = renderer.render(*conversation(role, "the fox"))
            hostile = renderer.render(*conversation(role, text))
            assert controls(renderer, hostile.ids) == controls(renderer, plain.ids), (name, text)
            assert ESCAPE_MARK not in renderer.decode(hostile.ids)
            if role in ("system", "user") or (role == "tool" and "\n" not in text):
                assert text.strip() in renderer.decode(hostile.ids)
            assert renderer.decode(hostile.ids) == hostile.text.replace(ESCAPE_MARK, "")


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_text_of_others_leaves_the_turns_as_they_are(family, data):
    _, renderer = family
    part = st.one_of(st.sampled_from(names_of(renderer)), st.text(max_size=4), st.just(ESCAPE_MARK))
    text = "".join(data.draw(st.lists(part, max_size=8)))
    plain = renderer.render([{"role": "user", "content": "x"}])
    hostile = renderer.render([{"role": "user", "content": text}])
    assert controls(renderer, hostile.ids) == controls(renderer, plain.ids)
    role = data.draw(st.sampled_from([role for role in ROLES if role != "argument"]))
    plain, hostile = (renderer.render(*conversation(role, f"x{words}")) for words in ("", text))
    assert controls(renderer, hostile.ids) == controls(renderer, plain.ids), role


def test_what_has_no_control_tokens_is_encoded_as_ever(family):
    _, renderer = family
    prompt = renderer.render(*conversation("user", "the quick <brown> fox |jumps| [over]"))
    assert prompt.ids == renderer.tokenizer.encode(prompt.text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("token", "is_control"),
    [
        *((token, True) for token in CONTROL),
        *((token, False) for token in ("<answer>", "[answer]", "fox", "<turn")),
    ],
)
def test_a_token_that_is_not_special_is_a_control_token_by_its_bars_or_the_template(token, is_control):
    assert _is_control_token(token, "{{ '<turn>' + messages[0].content }} fox") == is_control


def test_a_tag_of_a_task_is_the_token_that_its_tokenizer_has(tmp_path):
    texts = ["<answer>fox</answer> <think>dog</think>"] * 20
    size = TinySize(vocab_size=300, layers=1, hidden=64)
    make_tiny_model(tmp_path / "tiny", texts=texts, size=size, seed=0)
    renderer = ChatRenderer(tmp_path / "tiny")
    said = [
        {"role": "user", "content": "Write <answer>x</answer>, no <think>."},
        {"role": "assistant", "content": "<answer>fox</answer>"},
    ]
    found = controls(renderer, renderer.render(said).ids)
    assert [name for name in found if not name.startswith("<|")] == ["<answer>", "</answer>"] * 2


def test_a_reply_is_extended_verbatim_whatever_the_user_says_next(family):
    _, renderer = family
    end = renderer.template.end_of_turn[0]
    asked = [{"role": "user", "content": f"the dog?{end}"}]
    first = renderer.render(asked)
    sampled = [*renderer.encode("the fox"), renderer.template.end_of_turn[1]]
    said = [*asked, renderer.parse(first, sampled), {"role": "user", "content": f"no{end}"}]
    later = renderer.extend(first, sampled, said)
    assert later is not None
    assert later.ids[: len(first.ids) + len(sampled)] == [*first.ids, *sampled]
    plain = [{"role": "user", "content": "the dog?"}, said[1], {"role": "user", "content": "no"}]
    assert controls(renderer, later.ids) == controls(renderer, renderer.render(plain).ids)
