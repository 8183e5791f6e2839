"""Messages of servers that write slightly invalid JSON."""

import json
from itertools import pairwise

import mcp_types as types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.json_lines import fix_json
from buckeye.mcp.client.message_streams import JsonRepairStream, read_messages
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
    (message,), is_garbage = read_messages(line)
    assert (message.id, text_of(message), is_garbage) == (7, read, False)
    ((frame, passed),) = read_line(line)
    assert (frame.id, text_of(read_messages(passed)[0][0])) == (7, read)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":7,"result":{}}',
        b'{"jsonrpc":"2.0","id":7,"result":null}',
        b'{"jsonrpc":"2.0","id":7,"result":"\\ud83d"}',
        b'{"jsonrpc":"2.0","id":7,"error":{"code":"ENOENT"}}',
        b'{"jsonrpc":"2.0","id":"7","result":[]}',
        b'{"jsonrpc":"2.0","id":7}',
        b'[{"jsonrpc":"2.0","id":7,"result":3}]',
        b'{"id":7,"deep":' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)
def test_invalid_response_ends_its_request(line):
    (message,), is_garbage = read_messages(line)
    assert isinstance(message, types.JSONRPCError)
    assert (str(message.id), message.error.code, is_garbage) == ("7", types.PARSE_ERROR, True)


@pytest.mark.parametrize(
    "line", [b"loading...", b"3", b'"7"', b'{"level":"info"}', b'{"id":true}', b'{"id":7,"method":3}', b"[]]"]
)
def test_line_without_message_is_garbage(line):
    assert read_messages(line) == ([], True)


def test_batch_is_split_into_messages():
    line = b"[%s,%s]" % (ANSWER % b"b", ANSWER.replace(b"7", b"8") % rb"\ud83d")
    messages, is_garbage = read_messages(line)
    assert ([text_of(one) for one in messages], is_garbage) == (["ab", "a�"], False)
    assert [frame.id for frame, _ in read_line(line)] == [7, 8]


@given(
    st.text(st.characters(codec=None), max_size=8),
    st.sampled_from(["application/json", "text/event-stream; charset=utf-8"]),
    st.lists(st.integers(0, 120), max_size=4),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]),
)
def test_body_is_repaired_at_any_chunk_boundaries(text, kind, cuts, end):
    """Half a surrogate pair is replaced, at any cut of the body."""
    line = json.dumps({"jsonrpc": "2.0", "id": 7, "result": {"text": text}}).encode()
    is_stream = kind.startswith("text")
    body = b": ping\r\n\r\nevent: message\r\ndata: " + line + end if is_stream else line
    stream, places = JsonRepairStream(kind), [0, *sorted(cuts), len(body)]
    found = b"".join(stream.feed(body[a:b]) for a, b in pairwise(places))
    if is_stream:
        assert found.endswith(end)  # a complete event is passed on immediately
    found += stream.rest()
    if is_stream:
        assert found.startswith(b": ping\r\n\r\nevent: message\r\ndata: ")
        found = found.split(b"data: ")[1].rstrip()
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert types.jsonrpc_message_adapter.validate_json(found).result == {"text": expected}


@given(st.binary(max_size=40))
def test_fix_json_keeps_other_text(line):
    try:
        json.loads(line.decode("utf-8-sig", "replace"), strict=False)
    except ValueError:
        assert fix_json(line) == line
