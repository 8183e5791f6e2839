"""What the gateway adds to a tool call: the same server, spoken to directly and through the gateway.

    python benchmarks/gateway.py [--sessions 64] [--calls 50] [--think 1.0]

Every session has its own server process (a small script without libraries; it answers at once) and calls one
tool again and again. With `--think` seconds of mean pause between its calls, as a policy that writes its next
move, the figure is what one call waits longer; with 0 all call without a pause, and the figure is what the
machine can do at most. Starting the servers is not part of it. The time of a call is from its first byte to
the parsed answer; on a busy machine look at the processor time, which waiting for others does not change.
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
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil

from buckeye.envs.mcp.server_process import ServerProcess, clean_environment

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
    """A JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


async def play(call: Call, calls: int, think: float, seed: int) -> list[float]:
    """The seconds of each call of one session."""
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
    """Over pipes."""

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
    """Over the gateway, one connection for each session."""

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


def processor_seconds(pid: int) -> float:
    """What a process has computed so far, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--think", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "server.py")
        script.write_text(SERVER)
        alone = asyncio.run(direct(script, given.sessions, given.calls, given.think))
        words = ["--port", "0", "--command", f"{sys.executable} {script}", "--sessions", str(given.sessions)]
        gateway = subprocess.Popen(
            [sys.executable, "-u", "-m", "buckeye", "gateway", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert gateway.stdout is not None
            line = gateway.stdout.readline()
            found = re.search(r"http://\S+/mcp", line)
            if found is None:
                sys.exit(line)
            before = [processor_seconds(pid) for pid in (gateway.pid, os.getpid())]
            proxied = asyncio.run(through(found[0], given.sessions, given.calls, given.think))
            used = [
                processor_seconds(pid) - b for pid, b in zip((gateway.pid, os.getpid()), before, strict=True)
            ]
        finally:
            gateway.terminate()
            gateway.wait()
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
