"""Environment of HUD: multiply with a tool, count letters, and fail."""

import asyncio
import contextlib
import socket

from fastmcp import FastMCP
from hud import Environment
from hud.capabilities import Capability
from hud.graders import EvaluationResult, SubScore

env = Environment(name="games")
tools = FastMCP(name="tools")
served = []


@tools.tool()
def multiply(a: int, b: int) -> str:
    """Return the product of two numbers."""
    return str(a * b)


@env.initialize
async def serve():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served.append(asyncio.create_task(tools.run_http_async(host="127.0.0.1", port=port, show_banner=False)))
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        await asyncio.sleep(0.02)
    env.add_capability(Capability.mcp(name="tools", url=f"http://127.0.0.1:{port}/mcp"))


@env.template()
async def product(number: int):
    if number == 13:
        raise OSError("no product of 13")
    answer = yield f"{number} times 7?"
    if number == 11:
        raise OSError("no grade of 11")
    right, brief = float((answer or "").strip() == str(7 * number)), float(len(answer or "") < 5)
    scores = [
        SubScore(name="right", weight=0.8, value=right),
        SubScore(name="brief", weight=0.2, value=brief),
    ]
    yield EvaluationResult(reward=0.8 * right + 0.2 * brief, subscores=scores)


@env.template()
async def letters(word: str, letter: str):
    answer = yield [{"role": "user", "content": f"How often is {letter} in {word}?"}]
    yield 1.0 if str(word.count(letter)) == (answer or "").strip() else 0.0


tasks = [
    *(product(number=number) for number in (2, 3, 4)),
    letters(word="banana", letter="a"),
    letters(word="letter", letter="t"),
]
