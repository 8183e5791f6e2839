"""Chat rendering: earlier tokens stay what they were."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buckeye.errors import InferenceError, UsageError
from buckeye.inference.render import ChatRenderer

from .conftest import CHAT_TEMPLATE

QUESTION = [{"role": "user", "content": "the dog?"}]


@pytest.fixture(scope="session")
def save_renderer(tokenizer, tmp_path_factory):
    def save(template=CHAT_TEMPLATE, generation=None):
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(template)
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return ChatRenderer(directory)

    return save


@pytest.fixture(scope="session")
def renderer(save_renderer):
    return save_renderer()


def test_ids_and_text_of_a_prompt_agree(renderer):
    prompt = renderer.render(QUESTION)
    assert prompt.text == "<|im_start|>user\nthe dog?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(prompt.ids) == prompt.text
    assert prompt.ids == renderer.encode(prompt.text)


def test_no_prompt_depends_on_the_clock(save_renderer):
    """A run that goes on after midnight, or is resumed another day, asks the same."""
    renderer = save_renderer("{{ strftime_now('%Y-%m-%d %H:%M') }} {{ date_string }}: " + CHAT_TEMPLATE)
    assert renderer.render(QUESTION).text.startswith("2024-07-26 00:00 26 Jul 2024: <|im_start|>")


def test_stop_tokens_are_those_of_tokenizer_generation_config_and_template(save_renderer):
    renderer = save_renderer(generation={"eos_token_id": [1]})
    text = [renderer.decode([i]) for i in renderer.stop_token_ids]
    assert text == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_later_turn_extends_the_earlier_ids_verbatim(renderer, data):
    """Sampled ids are arbitrary: not what the tokenizer would make of their text, and no whole UTF-8."""
    ordinary = st.integers(3, len(renderer.tokenizer) - 1)
    conversation, messages = renderer.render(QUESTION), list(QUESTION)
    for _ in range(data.draw(st.integers(1, 3))):
        sampled = data.draw(st.lists(ordinary, max_size=8))
        end = data.draw(st.sampled_from([renderer.encode("<|im_end|>"), []]))  # ended, or cut off
        messages.append({"role": "assistant", "content": renderer.decode(sampled)})
        messages.append({"role": "user", "content": data.draw(st.text(max_size=5))})
        extended = renderer.extend(conversation, [*sampled, *end], messages)
        known = [*conversation.ids, *sampled, *end]
        assert extended.ids[: len(known)] == known
        assert extended.text == renderer.render(messages).text
        assert (
            renderer.encode(extended.text[len(conversation.text + renderer.decode(sampled + end)) :])
            == (extended.ids[len(known) :])
        )
        conversation = extended


def test_a_template_that_rewrites_history_cannot_be_extended(save_renderer):
    shortened = "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}...{% endif %}"
    renderer = save_renderer(CHAT_TEMPLATE.replace("{{ m['content'] }}", shortened))
    conversation = renderer.render(QUESTION)
    sampled = renderer.encode(" the fox ")
    reply = {"role": "assistant", "content": " the fox "}
    assert renderer.extend(conversation, sampled, [*QUESTION, reply, *QUESTION]) is None


def test_a_template_that_trims_does_not_change_what_was_sampled(save_renderer):
    renderer = save_renderer(CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"))
    conversation = renderer.render(QUESTION)
    sampled = renderer.encode(" the fox ")
    reply = {"role": "assistant", "content": " the fox "}
    extended = renderer.extend(conversation, sampled, [*QUESTION, reply, *QUESTION])
    assert renderer.decode(extended.ids) == (
        "<|im_start|>user\nthe dog?<|im_end|>\n<|im_start|>assistant\n the fox <|im_end|>\n"
        "<|im_start|>user\nthe dog?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_refuses_is_one_message(save_renderer):
    renderer = save_renderer("{{ raise_exception('only users may speak') }}")
    with pytest.raises(UsageError, match="only users may speak"):
        renderer.render(QUESTION)


def test_without_a_template_messages_cannot_be_rendered(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    renderer = ChatRenderer(tmp_path)
    assert renderer.decode(renderer.stop_token_ids) == "<|endoftext|>"
    with pytest.raises(UsageError, match="no chat template"):
        renderer.render(QUESTION)


def test_a_directory_without_tokenizer_is_one_message(tmp_path):
    with pytest.raises(InferenceError, match="No tokenizer could be loaded"):
        ChatRenderer(tmp_path)
