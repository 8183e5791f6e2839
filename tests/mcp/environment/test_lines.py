"""Messages of servers that write slightly invalid JSON."""

import json

import mcp_types as types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.json_lines import fix_json
from buckeye.mcp.client.message_streams import read_message
from buckeye.mcp.gateway.json_rpc import read_line

ANSWER = b'{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"a%s"}]}}'


def text_of(message):
    return message.result["content"][0]["text"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"\ud83d", "a�"),  # the first half of an emoji, as a server that cuts texts writes it
        (rb"\ude00 and more", "a� and more"),
        (rb"\ud83d\ud83d\ude00", "a�😀"),
        (rb"\ud83d\\u0041", "a�\\u0041"),
        (b"\xf0\x9f", "a�"),  # cut between its bytes
        (b"\x1b[31mred", "a\x1b[31mred"),
        (b"a\tb", "aa\tb"),
    ],
)
def test_response_with_cut_characters_is_read(written, read):
    line = ANSWER % written
    message = read_message(line)
    assert (message.id, text_of(message)) == (7, read)
    frame, passed = read_line(line)
    assert (frame.id, text_of(read_message(passed))) == (7, read)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":7,"result":{}}',
        b'{"jsonrpc":"2.0","id":7,"result":null}',
        b'{"jsonrpc":"2.0","id":7,"result":"\\ud83d"}',
        b'{"jsonrpc":"2.0","id":7,"error":{"code":"ENOENT"}}',
        b'{"jsonrpc":"2.0","id":"7","result":[]}',
        b'{"jsonrpc":"2.0","id":7}',
        b'{"id":7,"deep":' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)
def test_invalid_response_ends_its_request(line):
    message = read_message(line)
    assert isinstance(message, types.JSONRPCError)
    assert (str(message.id), message.error.code) == ("7", types.PARSE_ERROR)


@pytest.mark.parametrize(
    "line", [b"loading...", b"3", b'"7"', b'{"level":"info"}', b'{"id":true}', b'{"id":7,"method":3}', b"[]]"]
)
def test_line_without_message_is_garbage(line):
    assert read_message(line) is None


@given(st.binary(max_size=40))
def test_fix_json_keeps_other_text(line):
    try:
        json.loads(line.decode("utf-8-sig", "replace"), strict=False)
    except ValueError:
        assert fix_json(line) == line
