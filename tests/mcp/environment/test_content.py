"""Parts of a tool result, as the model reads them."""

import base64

import mcp_types as types
import pytest

from buckeye.mcp.client.content import extract_text


def resource(**content):
    return {"type": "resource", "resource": {"uri": "file:///notes.txt", **content}}


def encoded(data, kind):
    return resource(blob=base64.b64encode(data).decode(), mimeType=kind)


LINK = {"type": "resource_link", "name": "notes.txt", "uri": "file:///notes.txt", "description": "Notes."}
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
SOUND = {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}


@pytest.mark.parametrize(
    ("parts", "text", "dropped"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], "a\n", {}),
        ([{"type": "text", "text": "read"}, resource(text="line 1\nline 2")], "read\nline 1\nline 2", {}),
        ([LINK], "notes.txt: file:///notes.txt", {}),
        ([encoded("grüße".encode(), "text/plain; charset=utf-8")], "grüße", {}),
        ([encoded(b'{"a": 1}', "application/json")], '{"a": 1}', {}),
        ([encoded(b"\xff\xfe", "text/plain")], "", {"resource": 1}),
        ([encoded(b"%PDF", "application/pdf"), encoded(b"text", None)], "", {"resource": 2}),
        ([resource(blob="no base64!", mimeType="text/plain")], "", {"resource": 1}),
        ([IMAGE, SOUND, IMAGE], "", {"image": 2, "audio": 1}),
        ([], "", {}),
    ],
)
def test_extract_text_joins_text_and_counts_other_parts(parts, text, dropped):
    result = types.CallToolResult.model_validate({"content": parts})
    assert extract_text(result.content) == (text, dropped)
