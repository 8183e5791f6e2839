"""A gateway as a real process, and a client in raw HTTP."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.waiting import HANG, wait_for

SERVER = Path(__file__).with_name("scripted_server.py")
VARIABLES = ("FOO_BAR", "MARK", "MARKER", "NUMBER", "OUTSIDE", "SECRET", "SEED", "TOKEN")
"""Variables that clients of the test gateways may set."""
IDS = itertools.count(1)


def scripted(behaviour=""):
    return f"{sys.executable} {SERVER} {behaviour}".strip()


class GatewayProcess:
    def __init__(self, process, log, port):
        self.process, self.log_file, self.port = process, log, port
        self.url = f"http://127.0.0.1:{port}/mcp"

    def log(self):
        return self.log_file.read_text()

    def status(self, **headers):
        return httpx.get(f"http://127.0.0.1:{self.port}/status", headers=headers).json()

    def until(self, condition, what):
        wait_for(condition, what, more=self.log)


@contextmanager
def gateway(folder, *words, env=None, expect=0):
    """Start `buckeye gateway`, wait until it is ready, and end it with SIGTERM.

    It requires no key unless `env` contains one, or `words` contains `--key`: then it generates one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "gateway.log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | (
        env or {}
    )
    if "BUCKEYE_API_KEY" not in environment and "--key" not in words:
        words = ("--no-key", *words)
    words = [word for word in words if word != "--key"]
    words += [word for name in VARIABLES for word in ("--variable", name)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "buckeye", "gateway", "--port", "0", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
    try:
        ready = re.compile(r"ready on http://\S+?:(\d+)/mcp").search
        wait_for(lambda: ready(log.read_text()) or process.poll() is not None, "a gateway", log.read_text)
        assert process.poll() is None, log.read_text()
        yield GatewayProcess(process, log, int(ready(log.read_text())[1]))
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG) == expect, log.read_text()
    finally:
        process.kill()
        process.wait()


def request(method, params=None, request_id=None):
    message = {"jsonrpc": "2.0", "id": next(IDS) if request_id is None else request_id, "method": method}
    return message if params is None else message | {"params": params}


INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


class Client:
    """One session over HTTP, opened by the first call of `open`."""

    def __init__(self, url, **headers):
        self.url = url
        self.http = httpx.Client(
            headers={"accept": "application/json, text/event-stream", **headers}, timeout=HANG
        )
        self.session_id = None

    def post(self, message, **headers):
        if self.session_id is not None:
            headers["mcp-session-id"] = self.session_id
        return self.http.post(self.url, json=message, headers=headers)

    def open(self):
        answer = self.post(request("initialize", INITIALIZE))
        assert answer.status_code == 200, answer.text
        self.session_id = answer.headers["mcp-session-id"]
        assert self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}).status_code == 202
        return self

    def call(self, tool, **arguments):
        answer = self.post(request("tools/call", {"name": tool, "arguments": arguments}))
        assert answer.status_code == 200, answer.text
        return said(answer.json())

    def error(self, status, message=None):
        """Return the error text of a request, by default of one that opens a session."""
        answer = self.post(message or request("initialize", INITIALIZE))
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"]

    def close(self):
        answer = self.http.delete(self.url, headers={"mcp-session-id": self.session_id})
        assert answer.status_code == 204, answer.text


def said(message):
    """Return the text of a call's result, decoded if it is JSON."""
    content = message["result"]["content"][0]["text"]
    try:
        return json.loads(content)
    except ValueError:
        return content


def events(text):
    """Return the messages of an event stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
