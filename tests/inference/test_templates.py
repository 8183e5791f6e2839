"""Chat templates of any form: sampled ids stay, masks cover what was sampled, and no message is lost.

The slow test reads the templates of packages, or of the folder in the environment variable CHAT_TEMPLATES.
"""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckeye.errors import UsageError
from buckeye.inference.client import SamplingParams
from buckeye.inference.server.server import _load_renderer
from buckeye.orchestrator.policy import RecordingPolicy
from buckeye.trainer.data.chat_data import ChatFile, ChatFormat

from .scripted_model import FIND, call_of
from .test_conversations import MALFORMED, ScriptedEngine, check_tokens

PACKAGES = ("trl==1.16.0", "axolotl==0.19.0")  # with 100 templates of models
FORMS = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates" / "forms").glob("*.jinja"))
}
UNUSABLE = ("close_inside", "parts_only")
REWRITES = ("strips_reasoning", "opens_reasoning")
_NAMES = re.compile(r"<[|｜][^\s<>]{1,40}[|｜]>|</?s>|\[/?[A-Z_]{2,24}\]|\[\|[a-z]+\|\]|<[a-z]+_of_[a-z]+>")
_ENDS = (
    "<|END_OF_TURN_TOKEN|>",
    "<|im_end|>",
    "<|return|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
)


def save_model(template, folder, *, pad=False, ends=()):
    """Save a byte tokenizer with the control tokens of a template; `ends` are further ends of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = dict.fromkeys((*_NAMES.findall(template), "</s>", "<|end|>"))
    names |= dict.fromkeys(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    eos = next(end for end in _ENDS if end in template or end == "</s>")
    padding = {"pad_token": eos} if pad else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **padding)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ids = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, ends)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """Return a function that gives the chat format and the renderer of a template."""
    made = {}

    def make(template, **tokenizer):
        if template not in made:
            made[template] = ChatFormat(
                str(save_model(template, tmp_path_factory.mktemp("model"), **tokenizer))
            )
        return made[template], made[template]._renderer

    return make


texts = st.sampled_from(["", " ", "\n", "fox", "ŋš čhaŋ", "a\nb ", "😀", "{}", "<|end|>", "</s>", "<b>"])


@st.composite
def replies(draw, renderer):
    """Draw the ids of a reply, tokenized as no tokenizer would, and its finish reason."""
    body = draw(st.sampled_from([call_of(renderer), call_of(renderer, odd=True), MALFORMED, None])) or draw(
        texts
    )
    text = draw(st.sampled_from(["", "<think>\nso</think>\n\n", "so</think>", "<think>half"])) + body
    stops = renderer.stop_token_ids
    ids = [i for letter in text for i in renderer.encode(letter)] + draw(
        st.lists(st.integers(0, 255), max_size=2)
    )
    assert not set(stops).intersection(ids)
    return (ids, "length") if draw(st.booleans()) else ([*ids, draw(st.sampled_from(stops))], "stop")


async def converse(policy, engine, renderer, data, *, plain):
    """Run a conversation, and check that each prompt has all messages and ends as a fresh one does."""
    mark = 0
    messages = [{"role": "system", "content": data.draw(texts)}] if data.draw(st.booleans()) else []
    tools = () if plain else data.draw(st.sampled_from([(), (FIND,)]))

    def add(role, **fields):
        nonlocal mark
        mark += 1
        messages.append({"role": role, "content": f"{data.draw(texts)}m{mark}m", **fields})

    add("user")
    for _ in engine.answers:
        reply = await policy.chat(messages, tools=tools)
        prompt, fresh = renderer.decode(engine.prompts[-1]), renderer.prompt_text(messages, tools)
        marks = [f"m{number}m" for number in range(1, mark + 1) if f"m{number}m" in fresh]
        assert [found for found in marks if found not in prompt] == []
        assert prompt.endswith(renderer.decode(renderer.encode(fresh.rpartition(marks[-1])[2])))
        messages.append(reply.message)
        for call in reply.message.get("tool_calls", ()):
            add("tool", tool_call_id=call["id"], name=call["function"]["name"] or "unknown")
        if not reply.message.get("tool_calls") or data.draw(st.booleans()):
            add("user")


def check_rollout(renderer, data, *, plain=False):
    """Check the tokens of a rollout. Return its policy. A template may refuse the messages."""
    count = data.draw(st.integers(1, 4))
    ends = renderer.stop_token_ids
    plain_reply = ([*renderer.encode("so"), (renderer.template.end_of_turn or (None, ends[0]))[1]], "stop")
    engine = ScriptedEngine([plain_reply if plain else data.draw(replies(renderer)) for _ in range(count)])
    params = SamplingParams(max_tokens=1000)
    policy = RecordingPolicy(sampler=engine, renderer=renderer, params=params, seq_len=10**6, seed=0)
    try:
        asyncio.run(converse(policy, engine, renderer, data, plain=plain))
    except UsageError as error:
        if error.code != "BK-TEMPLATE":
            raise
    if engine.sampled:
        check_tokens(engine, policy)
    return policy


def check_chat(chat, renderer, data):
    """Check the tokens of a conversation of SFT: each reply is trained once, up to its stop token."""
    messages, marks = [], []
    for number in range(data.draw(st.integers(1, 3))):
        reply = {"role": "assistant", "content": f"a{number}a {data.draw(texts)} b{number}b"}
        marks += [f"a{number}a", f"b{number}b"]
        if data.draw(st.booleans()):
            reply["reasoning_content"] = f"r{number}r"
            marks.append(f"r{number}r")
        messages += [{"role": "user", "content": f"q{number}q {data.draw(texts)}"}, reply]
    try:
        samples = chat.samples({"messages": messages})
        prompts = [renderer.render(messages[:end]).ids for end in range(1, len(messages), 2)]
    except UsageError as error:
        if error.code == "BK-TEMPLATE":
            return
        raise
    trained = ""
    for sample in samples:
        ids, mask = sample.token_ids.tolist(), [*sample.loss_mask.tolist(), False]
        assert ids[: mask.index(True)] in prompts
        ends = [i for i in range(len(ids)) if mask[i] and not mask[i + 1]]
        assert {ids[i] for i in ends} <= set(renderer.stop_token_ids)
        trained += renderer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert [n for n in range(len(messages)) if f"q{n}q" in trained] == []
    assert max(trained.count(mark) for mark in marks) <= 1
    missing = [mark for mark in marks if mark not in trained]
    assert chat.omits_text({"messages": messages}, samples) == bool(missing)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in UNUSABLE])
@settings(max_examples=20)
@given(data=st.data())
def test_any_reply_is_kept_and_masked(formats, name, data):
    number = list(FORMS).index(name)
    ends = ["<|user|>", "<|end|>"] if number % 3 == 0 else []
    chat, renderer = formats(FORMS[name], pad=number % 2 == 0, ends=ends)
    check_rollout(renderer, data)
    check_chat(chat, renderer, data)
    assert name in REWRITES or check_rollout(renderer, data, plain=True).turns_branched == 0


@pytest.mark.parametrize("name", ["python_calls", "xml_calls"])
def test_result_of_a_call_with_its_own_end_is_kept(formats, name):
    _, renderer = formats(FORMS[name])
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"word": "dog"}'}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "an animal"}
    question = {"role": "user", "content": "dog?"}
    conversation = renderer.render([question], [FIND])
    sampled = [*renderer.encode(call_of(renderer)), renderer.template.end_of_turn[1]]
    extended = renderer.extend(conversation, sampled, [question, reply, result], [FIND])
    assert extended is None or "an animal" in renderer.decode(extended.ids)


@pytest.mark.parametrize(
    ("name", "end", "trained"),
    [
        ("two_ends", "<|end|>", "so<|end|>so<|end|>"),
        ("line_before_the_end", "<|end|>", "so\n<|end|>so\n<|end|>"),
        ("end_before_the_next_message", "<|user|>", "so<|user|>so</s>"),
    ],
)
def test_reply_ends_at_the_first_stop_token(formats, name, end, trained):
    chat, renderer = formats(FORMS[name])
    assert renderer.template.end_of_turn[0] == end
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    (sample,) = chat.samples({"messages": turn * 2})
    assert renderer.decode(sample.token_ids[sample.loss_mask].tolist()) == trained


def test_token_inside_a_reply_is_not_its_end(formats):
    _, renderer = formats(FORMS["close_inside"])
    assert renderer.template.end_of_turn is None


def test_template_that_omits_messages_is_refused(formats):
    _, renderer = formats(FORMS["parts_only"])
    with pytest.raises(UsageError) as error:
        renderer.render([{"role": "user", "content": "dog?"}])
    assert error.value.code == "BK-TEMPLATE"


def test_omitted_reasoning_is_reported(formats, tmp_path, caplog):
    chat, _ = formats(FORMS["two_ends"])
    reply = {"role": "assistant", "content": "so", "reasoning_content": "I think"}
    path = tmp_path / "chats.jsonl"
    turns = [
        [{"role": "user", "content": "q"}, reply | change] for change in ({}, {"reasoning_content": "So!"})
    ]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    with caplog.at_level(logging.WARNING):
        file = ChatFile(path, chat, seed=0, seq_len=100)
    assert file.counts.shortened == 1
    assert "in 1 of 2 conversations" in caplog.text


def check_all(chat, renderer):
    @settings(max_examples=30, database=None)
    @given(data=st.data())
    def check(data):
        check_rollout(renderer, data)
        check_chat(chat, renderer, data)

    check()


@pytest.mark.slow
def test_templates_of_packages(formats, tmp_path):
    folder = os.environ.get("CHAT_TEMPLATES")
    if folder is None:
        folder = tmp_path / "packages"
        install = ["-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        subprocess.run([sys.executable, *install], check=True, timeout=600)
    paths = sorted(Path(folder).rglob("*.jinja"))
    assert len(paths) > 50
    usable, failed = 0, {}
    for path in paths:
        try:
            chat, renderer = formats(path.read_text(encoding="utf-8"), pad=True)
            renderer.render([{"role": "user", "content": "dog?"}])
        except UsageError:  # a template may refuse
            continue
        usable += 1

        try:
            check_all(chat, renderer)
        except AssertionError as error:
            failed[path.name] = str(error)[:300]
    assert failed == {}
    assert usable > 50


def test_server_reports_a_template_that_refuses_chats(tmp_path, caplog):
    _load_renderer(save_model("{{ raise_exception('never') }}", tmp_path))
    assert "Chats are refused" in caplog.text
    assert "never" in caplog.text
