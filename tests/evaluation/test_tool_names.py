"""Tool names that OpenAI-compatible servers refuse are mapped to valid names and back."""

import asyncio
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.base import CallOptions
from buckeye.envs.chat_server import ChatServer
from buckeye.errors import InferenceError
from buckeye.evaluation.chat_policy import ChatPolicy, ChatSampling
from buckeye.evaluation.tool_names import ToolNames

STRICT = re.compile(r"[a-zA-Z0-9_-]{1,64}")
ASK = [{"role": "user", "content": "Read it."}]


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def call(name):
    function = {"name": name, "arguments": "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def result(name):
    return {"role": "tool", "tool_call_id": "1", "name": name, "content": "text"}


def called(message):
    return message["tool_calls"][0]["function"]["name"]


def hosted(refused=lambda name: not STRICT.fullmatch(name)):
    """Return a policy behind a server as strict as OpenAI's, and the list of its requests.

    The server calls the last tool of each request.
    """
    asked = []

    def answer(request):
        body = json.loads(request.content)
        asked.append(body)
        names = [one["function"]["name"] for one in body["tools"]]
        for number, name in enumerate(names):
            if refused(name):
                return httpx.Response(400, text=f"'tools[{number}].function.name' does not match '^[a-z]+$'")
        history = [called(one) for one in body["messages"] if one.get("tool_calls")]
        history += [one["name"] for one in body["messages"] if "name" in one]
        if any(refused(name) for name in history):
            return httpx.Response(400, text="'messages[1].tool_calls[0].function.name' does not match")
        return httpx.Response(
            200, json={"choices": [{"message": call(names[-1]), "finish_reason": "tool_calls"}]}
        )

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return ChatPolicy(
        ChatServer(base_url="http://hosted/v1", model="big", client=client), ChatSampling()
    ), asked


def ask(policy, messages, *names, **options):
    return asyncio.run(
        policy.ask(messages, tools=[tool(name) for name in names], options=CallOptions(**options))
    )


LONG = "namespace_of_a_server_with_a_long_name/" + "x" * 60


@pytest.mark.parametrize("name", ["fs.read_file", "files/read", LONG, "größe", "2048.move", "a b", "read"])
def test_tool_call_has_the_original_name(name):
    policy, asked = hosted()
    reply = ask(policy, ASK, "fs_read_file", "other.one", name)
    assert called(reply.message) == name
    again = ask(policy, [*ASK, reply.message, result(name)], "fs_read_file", "other.one", name)
    assert called(again.message) == called(policy.messages[-1]) == name
    assert asked[0]["tools"] == asked[1]["tools"]  # the same name in every turn
    assert asked[1]["messages"][2]["name"] == called(asked[1]["messages"][1])


def test_required_call_uses_the_server_side_name():
    policy, asked = hosted()
    ask(policy, ASK, "fs.read", tool="fs.read", must_call=True)
    assert (
        asked[0]["tool_choice"]["function"]["name"] == asked[0]["tools"][0]["function"]["name"] == "fs_read"
    )


def test_unreadable_call_is_returned_to_the_server():
    policy, asked = hosted()
    ask(policy, [*ASK, call(""), result("unknown")], "read")
    assert STRICT.fullmatch(called(asked[0]["messages"][1]))


def test_text_parts_are_sent_as_one_text_and_others_as_they_are():
    policy, asked = hosted()
    image = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": content} for content in ([{"type": "text", "text": "a"}], image)]
    ask(policy, messages, "read")
    assert [message["content"] for message in asked[0]["messages"]] == ["a", image]


def test_a_refused_tool_is_named(refusal):
    policy, _ = hosted(lambda name: "-" in name)
    with refusal(InferenceError):
        ask(policy, ASK, "read", "read-all")


@given(
    st.lists(st.text(min_size=1, max_size=80), unique=True, max_size=8),
    st.lists(st.text(max_size=80), max_size=4),
)
def test_tool_names_are_valid_unique_and_reversible(names, others):
    history = [message for name in others for message in (call(name), result(name))]
    mapped = ToolNames([tool(name) for name in names], history)
    sent = [mapped.to_server_name(name) for name in dict.fromkeys([*names, *others])]
    assert all(STRICT.fullmatch(name) for name in sent)
    assert len(set(sent)) == len(sent)
    assert [called(mapped.from_server_message(call(mapped.to_server_name(name)))) for name in names] == names
    assert all(
        mapped.to_server_name(name) == name
        for name in names
        if re.fullmatch(r"[A-Za-z_][\w-]{,63}", name, re.ASCII)
    )
