"""Measure what the gateway adds to a tool call: one server, called directly and through the gateway.

    python benchmarks/gateway.py [--sessions 64] [--calls 50] [--think 1.0]
    python benchmarks/gateway.py --starts 20 [--command text-2048]

Every session has its own server process (a small script without libraries that answers immediately) and calls
one tool repeatedly. With `--think` seconds of mean pause between its calls, like a policy that writes its
next move, the result is the extra latency of one call; with 0 all sessions call without a pause, and the
result is the machine's maximum. Server starts are excluded. The time of a call is from its first byte to the
parsed answer; on a busy machine use the processor time, which waiting does not change.

With `--starts` it measures the cost of a session of a Python server from start to end, in processor time of
the gateway and its child processes: with its libraries imported once, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil

from buckeye.base.process import clean_environment
from buckeye.mcp.client.server_process import ServerProcess

SERVER = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "initialize":
        info = {"name": "benchmark", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    else:
        result = {"content": [{"type": "text", "text": "x" * 500}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
INFO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "benchmark", "version": "1"},
}
Call = Callable[[str, dict[str, Any]], Awaitable[Any]]


def message(number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


async def play(call: Call, calls: int, think: float, seed: int) -> list[float]:
    """Return the seconds of each call of one session."""
    pause = random.Random(seed)
    await call("initialize", INFO)
    took = []
    for turn in range(calls):
        await asyncio.sleep(pause.uniform(0, 2 * think))
        begun = time.perf_counter()
        await call("tools/call", {"name": "move", "arguments": {"direction": "left", "turn": turn}})
        took.append(time.perf_counter() - begun)
    return took


async def direct(script: Path, sessions: int, calls: int, think: float) -> list[float]:
    """Return the seconds of calls over pipes."""

    async def session(seed: int) -> list[float]:
        process = await ServerProcess.start(
            [sys.executable, str(script)], env=clean_environment({}), name="direct"
        )
        numbers = iter(range(10**9))

        async def call(method: str, params: dict[str, Any]) -> Any:
            await process.write_line(json.dumps(message(next(numbers), method, params)).encode())
            return json.loads(await process.read_line() or b"")

        try:
            return await play(call, calls, think, seed)
        finally:
            await process.close(grace=0.0)

    return list(chain.from_iterable(await asyncio.gather(*map(session, range(sessions)))))


async def through(url: str, sessions: int, calls: int, think: float) -> list[float]:
    """Return the seconds of calls through the gateway, with one connection per session."""

    async def session(seed: int) -> list[float]:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            headers = {"accept": "application/json, text/event-stream"}
            numbers = iter(range(10**9))

            async def call(method: str, params: dict[str, Any]) -> Any:
                answer = await client.post(url, json=message(next(numbers), method, params), headers=headers)
                answer.raise_for_status()
                if method == "initialize":
                    headers["mcp-session-id"] = answer.headers["mcp-session-id"]
                return answer.json()

            took = await play(call, calls, think, seed)
            await client.delete(url, headers=headers)
            return took

    return list(chain.from_iterable(await asyncio.gather(*map(session, range(sessions)))))


def family_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants that still run or were waited for."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


async def start_and_end(url: str, count: int) -> list[float]:
    """Start `count` sessions in sequence; return the seconds until each has answered."""
    headers = {"accept": "application/json, text/event-stream"}
    took = []
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for _ in range(count):
            begun = time.perf_counter()
            answer = await client.post(url, json=message(0, "initialize", INFO), headers=headers)
            answer.raise_for_status()
            took.append(time.perf_counter() - begun)
            session = {"mcp-session-id": answer.headers["mcp-session-id"]}
            (await client.delete(url, headers=session)).raise_for_status()
            await asyncio.sleep(0.2)  # until it has been waited for
    return took


def measure_starts(command: str, count: int) -> None:
    """Print the cost of a session with and without preloaded imports."""
    for name, words in (("by itself", ["--no-preload"]), ("forked", [])):
        with running(["--command", command, *words]) as (pid, url):
            asyncio.run(start_and_end(url, 1))
            time.sleep(5.0)  # until the libraries are imported
            before = family_seconds(pid)
            took = asyncio.run(start_and_end(url, count))
            used = (family_seconds(pid) - before) / count
        print(
            f"{name:10} {used:.3f} s of a core a session, {statistics.median(took):.3f} s to its first answer"
        )


@contextmanager
def running(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run a gateway on a free port; yield its process id and address."""
    argv = [sys.executable, "-u", "-m", "buckeye", "gateway", "--port", "0", "--no-key", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while (found := re.search(r"http://\S+/mcp", said)) is None:
                line = process.stdout.readline()
                if not line:
                    sys.exit(said)
                said += line
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield process.pid, found[0]
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--think", type=float, default=1.0)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--command", default="text-2048")
    given = parser.parse_args()
    if given.starts:
        measure_starts(given.command, given.starts)
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "server.py")
        script.write_text(SERVER)
        alone = asyncio.run(direct(script, given.sessions, given.calls, given.think))
        words = ["--command", f"{sys.executable} {script}", "--sessions", str(given.sessions)]
        with running(words) as (gateway, url):
            before = [processor_seconds(pid) for pid in (gateway, os.getpid())]
            proxied = asyncio.run(through(url, given.sessions, given.calls, given.think))
            used = [processor_seconds(pid) - b for pid, b in zip((gateway, os.getpid()), before, strict=True)]
    print(f"{given.sessions} sessions, {given.calls} calls each, {given.think:g} s between two calls")
    for name, took in (("direct", alone), ("gateway", proxied)):
        cuts = statistics.quantiles(took, n=100)
        print(f"{name:8} median {cuts[49] * 1e3:6.2f} ms   p95 {cuts[94] * 1e3:6.2f} ms")
    medians = 1e3 * (statistics.median(proxied) - statistics.median(alone))
    means = 1e3 * (statistics.mean(proxied) - statistics.mean(alone))
    print(f"added    median {medians:6.2f} ms   mean {means:6.2f} ms")
    per_call = [1e3 * seconds / len(proxied) for seconds in used]
    print(f"processor time per call: gateway {per_call[0]:.2f} ms, client {per_call[1]:.2f} ms")


if __name__ == "__main__":
    main()
