"""Only what the assistant wrote is trained, tokenized as a policy would have sampled it."""

from __future__ import annotations

import json

import pytest

from buckeye.errors import UsageError
from buckeye.trainer.chat_data import ChatFile, chat_samples, load_chat_tokenizer


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_chat_tokenizer(str(tiny_model))


def _messages(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def _trained(sample, tokenizer):
    """The trained stretches as text."""
    stretches, current = [], []
    for token, trained in zip([*sample.token_ids, 0], [*sample.loss_mask, False], strict=True):
        if trained:
            current.append(int(token))
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


def test_one_turn(loaded):
    tokenizer, stops = loaded
    assert stops == ("<|im_end|>",)
    (sample,) = chat_samples(_messages("Héthu?", "waŋ"), tokenizer, stops)
    text = tokenizer.decode(sample.token_ids)
    assert text == "<|im_start|>user\nHéthu?<|im_end|>\n<|im_start|>assistant\nwaŋ<|im_end|>"
    assert _trained(sample, tokenizer) == ["waŋ<|im_end|>"]


def test_several_turns_are_one_sample(loaded):
    tokenizer, stops = loaded
    (sample,) = chat_samples(_messages("a", "b", "c", "d"), tokenizer, stops)
    assert _trained(sample, tokenizer) == ["b<|im_end|>", "d<|im_end|>"]
    whole = tokenizer.apply_chat_template(_messages("a", "b", "c", "d")["messages"], tokenize=False)
    assert tokenizer.decode(sample.token_ids) == whole.removesuffix("\n")


def test_a_template_that_rewrites_history_gives_several_samples(loaded, tiny_model):
    tokenizer, stops = load_chat_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('|')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    first, second = chat_samples(_messages("a", "thought|b", "c", "thought|d"), tokenizer, stops)
    assert _trained(first, tokenizer) == ["thought|b<|im_end|>"]
    assert _trained(second, tokenizer) == ["thought|d<|im_end|>"]
    assert "\nb<|im_end|>" in tokenizer.decode(second.token_ids)


def test_a_template_that_does_not_continue_its_prompt_is_refused(tiny_model):
    tokenizer, stops = load_chat_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% if add_generation_prompt %}X{% endif %}{{ messages|length }}"
    with pytest.raises(UsageError, match="does not continue"):
        chat_samples(_messages("a", "b"), tokenizer, stops)
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(UsageError, match="no system message"):
        chat_samples(_messages("a", "b"), tokenizer, stops)


def _write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_epochs_are_shuffled_and_complete(loaded, tmp_path):
    lines = [json.dumps(_messages("q", f"answer {i}")) for i in range(7)]
    data = ChatFile(_write(tmp_path / "d.jsonl", *lines, ""), *loaded, seed=3)

    def answers(samples):
        return [_trained(s, loaded[0])[0] for s in samples]

    assert len(data) == 7
    everything = answers(data.all())
    first, second = answers(data.take(0, 7)), answers(data.take(7, 7))
    assert sorted(first) == sorted(second) == sorted(everything)
    assert len({tuple(first), tuple(second), tuple(everything)}) == 3
    assert answers(data.take(5, 4)) == first[5:] + second[:2]
    again = ChatFile(tmp_path / "d.jsonl", *loaded, seed=3)
    assert answers(again.take(0, 7)) == first
    other = ChatFile(tmp_path / "d.jsonl", *loaded, seed=4)
    assert answers(other.take(0, 7)) != first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"d\.jsonl:2: not JSON"),
        ("[]", r"d\.jsonl:2: expected"),
        ('{"messages": "x"}', r"d\.jsonl:2: expected"),
        ('{"messages": [{"content": "x"}]}', r"d\.jsonl:2: expected"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"d\.jsonl:2: no assistant"),
    ],
)
def test_bad_lines_are_named(loaded, tmp_path, line, message):
    good = json.dumps(_messages("a", "b"))
    with pytest.raises(UsageError, match=message):
        ChatFile(_write(tmp_path / "d.jsonl", good, line), *loaded, seed=0)


def test_missing_and_empty_files(loaded, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        ChatFile(tmp_path / "none.jsonl", *loaded, seed=0)
    with pytest.raises(UsageError, match="is empty"):
        ChatFile(_write(tmp_path / "d.jsonl"), *loaded, seed=0)


def test_a_model_without_tokenizer_is_one_message(tmp_path):
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_chat_tokenizer(str(tmp_path / "none"))
