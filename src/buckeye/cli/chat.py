"""`buckeye chat`: talk to a model through an engine of its own, which ends with the conversation."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import typer

from buckeye.cli.terminal import status_line
from buckeye.errors import UsageError
from buckeye.launch.serve import served_model
from buckeye.sizing.model import fetch_served


def talk(model: str, prompt: str | None, *, temperature: float, max_tokens: int) -> None:
    """Answer `prompt` and return, or hold a conversation until an empty line or Ctrl-D."""
    asyncio.run(_talk(model, prompt, temperature, max_tokens))


async def _talk(model: str, prompt: str | None, temperature: float, max_tokens: int) -> None:
    with status_line(f"fetching {model}"):
        path = fetch_served(model)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for input() to return
    async with AsyncExitStack() as stack:
        with status_line(f"waiting for a server of {model} to start"):
            server = await stack.enter_async_context(served_model(path))
        messages: list[dict[str, str]] = []
        while True:
            question = prompt or _ask()
            if not question:
                return
            messages.append({"role": "user", "content": question})
            with status_line(f"waiting for the reply of {model}"):
                reply = await server.chat(messages, temperature=temperature, max_tokens=max_tokens)
            typer.echo(reply)
            messages.append({"role": "assistant", "content": reply})
            if prompt is not None:
                return


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError:
        raise UsageError("the input is not UTF-8") from None
