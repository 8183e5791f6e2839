"""What is said where no session came about: the address, the cause, what to do, and nothing secret."""

import errno
import socket

import httpx2
import pytest

from buckeye.mcp.client.unreachable import shown_address, why_unreachable

URL = "http://me:secret@there:8765/mcp?key=secret"


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "refusal", "says"),
    [
        (httpx2.ConnectError("All connection attempts failed"), None, "nothing listens there"),
        (
            caused(httpx2.ConnectError("x"), OSError(errno.ECONNREFUSED, "refused")),
            None,
            "nothing listens there (connection refused)",
        ),
        (
            caused(httpx2.ConnectError("x"), socket.gaierror(-2, "Name or service not known")),
            None,
            "the host there is not known",
        ),
        (httpx2.ConnectTimeout(""), None, "does not answer"),
        (httpx2.ReadError("the line was cut\nand more"), None, "cannot be reached: the line was cut"),
        (RuntimeError("Not Found"), 404, "answered with status 404: a server is there, and no MCP server"),
        (RuntimeError("x"), 401, "refused with status 401: check the key"),
        (RuntimeError("x"), 500, "answered with status 500"),
        (
            RuntimeError("Unexpected content type: text/html"),
            None,
            "not as an MCP server (Unexpected content",
        ),
        (None, None, "not as an MCP server"),
    ],
)
def test_the_cause_is_said_with_the_address(error, refusal, says):
    text = why_unreachable(URL, error, refusal)
    assert text.startswith("http://there:8765/mcp")
    assert says in text
    assert "secret" not in text
    assert "\n" not in text


def test_no_address_at_all():
    assert why_unreachable("http:///mcp", None, None).startswith("http:///mcp is no address")
    assert shown_address("http://there:notaport/mcp") == "http://there/mcp"
