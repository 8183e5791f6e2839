"""Chat rendering: earlier tokens never change."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import InferenceError, UsageError
from buckeye.inference.render import ChatRenderer, template_sandbox
from buckeye.inference.render.template import PROBE_TOOL_TURN, PROBE_TOOLS

from .chat_families import FAMILIES, save_family, template_of
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


def test_ids_and_text_of_a_prompt_agree(renderer, wording):
    prompt = renderer.render(QUESTION)
    assert prompt.text == wording
    assert renderer.decode(prompt.ids) == prompt.text
    assert renderer.decode_in_thread(prompt.ids) == prompt.text
    assert prompt.ids == renderer.encode(prompt.text)


def test_prompts_do_not_share_their_ids(renderer):
    first, copy = renderer.render(QUESTION), renderer.render(QUESTION).ids
    first.ids.append(0)
    assert renderer.render(QUESTION).ids == copy


@pytest.mark.parametrize("value", [Path("a"), 1 << 70, {1: 2}])
def test_values_that_are_not_json_are_rendered(renderer, value):
    message = {**QUESTION[0], "extra": value}
    assert renderer.render([message]).ids == renderer.render(QUESTION).ids


def test_half_a_surrogate_pair_is_replaced(renderer):
    """A server or an environment may cut text within an emoji; this must not end the rollout."""
    cut, replaced = ([{"role": "user", "content": f"a{half}"}] for half in ("\ud83d", "\ufffd"))
    assert renderer.render(cut).ids == renderer.render(replaced).ids
    assert renderer.encode_prompt("a\ude00") == renderer.encode_prompt("a\ufffd")


def test_prompt_does_not_depend_on_the_date(save_renderer):
    """A run that continues after midnight or resumes on another day renders the same prompts."""
    renderer = save_renderer("{{ strftime_now('%Y-%m-%d %H:%M') }} {{ date_string }}: " + CHAT_TEMPLATE)
    assert renderer.render(QUESTION).text.startswith("2024-07-26 00:00 26 Jul 2024: <|im_start|>")


def test_stop_tokens_are_those_of_tokenizer_generation_config_and_template(save_renderer):
    renderer = save_renderer(generation={"eos_token_id": [1]})
    text = [renderer.decode([i]) for i in renderer.stop_token_ids]
    assert text == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@given(data=st.data())
def test_extend_keeps_earlier_ids(renderer, data):
    """Sampled ids are arbitrary: not necessarily the tokenizer's for their text, nor valid UTF-8."""
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


def test_extend_returns_none_if_the_template_rewrites_history(save_renderer):
    shortened = "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}...{% endif %}"
    renderer = save_renderer(CHAT_TEMPLATE.replace("{{ m['content'] }}", shortened))
    conversation = renderer.render(QUESTION)
    sampled = renderer.encode(" the fox ")
    reply = {"role": "assistant", "content": " the fox "}
    assert renderer.extend(conversation, sampled, [*QUESTION, reply, *QUESTION]) is None


def test_extend_keeps_sampled_ids_if_the_template_trims(save_renderer, wording):
    renderer = save_renderer(CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"))
    conversation = renderer.render(QUESTION)
    sampled = renderer.encode(" the fox ")
    reply = {"role": "assistant", "content": " the fox "}
    extended = renderer.extend(conversation, sampled, [*QUESTION, reply, *QUESTION])
    assert renderer.decode(extended.ids) == wording


def _without_prompt(template):
    """Cut off the template's last block on `add_generation_prompt`."""
    begins = [found.start() for found in re.finditer(r"\{%-? if add_generation_prompt", template)]
    return template[: begins[-1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_header_is_added_if_the_template_ignores_the_generation_prompt(tmp_path, family):
    whole = ChatRenderer(save_family(family, tmp_path / "whole"))
    cut = ChatRenderer(save_family(family, tmp_path / "cut", _without_prompt(template_of(family))))
    assert (whole.template.missing_header, whole.template.header) == ("", cut.template.missing_header)
    replied = [*QUESTION, {"role": "assistant", "content": "it"}, *QUESTION]
    for messages in (QUESTION, replied):
        assert cut.render(messages).ids == whole.render(messages).ids
    first, sampled = cut.render(QUESTION), cut.encode("it")
    extended = cut.extend(first, sampled, replied)
    assert extended is None or extended.ids[: len(first.ids + sampled)] == [*first.ids, *sampled]
    assert (extended is None) is (whole.extend(first, sampled, replied) is None)


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
            "{{ m.content }}</s>{% endif %}{% endfor %}",
            "",
        ),  # Mistral: the reply follows immediately
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>", ""),  # always present
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant>"),
        ("{{ messages | length }}", ""),  # unknown
        ("{{ raise_exception('no') }}", ""),
    ],
)
def test_header_is_not_added_if_replies_have_none(save_renderer, template, header):
    assert save_renderer(template).template.missing_header == header


def test_refusing_template_is_one_message(save_renderer, refusal):
    renderer = save_renderer("{{ raise_exception('only users may speak') }}")
    with refusal(UsageError):
        renderer.render(QUESTION)


STRINGS_ONLY = CHAT_TEMPLATE.replace("m['content']", "m['content'] if m['content'] is string else ''")
TEXT, IMAGE = {"type": "text", "text": "the dog?"}, {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    "content", [[TEXT, IMAGE], [{"type": "input_audio"}], [{"type": "text"}], ["the dog?"], 5, {"text": "a"}]
)
def test_content_other_than_text_is_refused(renderer, content, refusal):
    with refusal(UsageError):
        renderer.render([*QUESTION, {"role": "user", "content": content}])


@pytest.mark.parametrize("message", ["the dog?", {"content": "the dog?"}, {"role": None, "content": ""}])
def test_message_without_a_role_is_refused(renderer, message):
    with pytest.raises(UsageError) as raised:
        renderer.render([*QUESTION, message])
    assert raised.value.code == "BK-TEMPLATE"


def test_text_parts_are_joined(save_renderer):
    """Also with a template that would omit content that is not a string."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the dog?", "cache_control": {}}]
    for template in (CHAT_TEMPLATE, STRINGS_ONLY):
        renderer = save_renderer(template)
        whole = renderer.render([{"role": "user", "content": "What is the dog?"}])
        assert renderer.render([{"role": "user", "content": parts}]).ids == whole.ids
        assert renderer.render([{"role": "user", "content": tuple(parts)}]).ids == whole.ids


def test_without_a_template_messages_cannot_be_rendered(tokenizer, tmp_path, refusal):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    renderer = ChatRenderer(tmp_path)
    assert renderer.decode(renderer.stop_token_ids) == "<|endoftext|>"
    with refusal(UsageError):
        renderer.render(QUESTION)


def test_directory_without_tokenizer_is_refused(tmp_path, refusal):
    with refusal(InferenceError):
        ChatRenderer(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_sandboxed_template_equals_transformers(family, tmp_path):
    renderer = ChatRenderer(save_family(family, tmp_path))
    thought = {"role": "assistant", "content": "It is that.", "reasoning": "Hm."}
    conversations = (
        [QUESTION[0]],
        PROBE_TOOL_TURN,
        [{"role": "system", "content": "Be brief."}, *PROBE_TOOL_TURN],
    )
    for messages in (*conversations, [QUESTION[0], thought, QUESTION[0]]):
        for tools in ((), PROBE_TOOLS):
            expected = renderer.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                date_string="26 Jul 2024",
            )
            assert renderer.template._render(list(messages), tools, prompt=True) == expected


def test_template_gets_plain_values(save_renderer):
    class Text(str):
        def secret(self):
            return "told"

    renderer = save_renderer("{{ messages[0].content }} {{ messages[0].content.secret is defined }}")
    assert renderer.prompt_text([{"role": "user", "content": Text("hi")}]) == "hi False"


BROKEN = {
    "a division by zero": "\n\n{{ 1/0 }}",
    "a syntax error": "\n{% for %}",
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
    "something undefined": "{{ nothing.at.all }}",
    "a wrong type": "{{ messages + 3 }}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested too deeply": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "something private": "{{ ''.__class__.__mro__ }}",
    "a private name in a namespace": "{{ namespace(__class__=1) }}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
}
COSTLY = {
    "loops in loops": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a loop in itself": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "a recursion of two": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "a power": "{{ 9**(9**9) }}",
    "a product": "{{ 'x' * 10**11 }}",
    "a list": "{{ ([0] * 10**11) | length }}",
    "doubled by +": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "doubled by ~": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "doubled by a block": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}{{ n.x }}"
    ),
    "a long result": "{% set x = 'x' * 10**6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "a method": "{{ 'x'.center(10**11) }}",
    "a filter": "{{ messages[0].content | center(10**11) }}",
    "digits": "{{ 1.5 | round(10**11) }}",
    "an indented object": "{{ messages | tojson(indent=10**11) }}",
    "a format": "{{ '{:>99999999999}'.format(1) }}",
    "a format in a format": "{{ '{:>{}}'.format(1, 10**11) }}",
    "a format of old": "{{ '%099999999999d' % 3 }}",
    "a filter of formats": "{{ '%*d' | format(10**11, 3) }}",
    "replacing": "{% set x = 'x' * 10**6 %}{{ x.replace('x', x) }}",
    "joining": "{{ range(99999) | list | join('x' * 10**7) }}",
    "its own length": "{# " + "x" * 2**20 + " #}",
}


@pytest.mark.parametrize("template", BROKEN)
def test_broken_template_is_reported_with_its_line(save_renderer, template, refusal):
    with refusal(UsageError):
        save_renderer(BROKEN[template]).render(QUESTION)


@pytest.mark.parametrize("template", COSTLY)
def test_too_costly_template_is_refused(monkeypatch, save_renderer, template):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(UsageError, match="more than"):
        save_renderer(COSTLY[template])
