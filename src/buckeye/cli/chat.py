"""`buckeye chat`: talk to a model through an engine of its own, which ends with the conversation."""

from __future__ import annotations

import asyncio
import signal

import typer

from buckeye.errors import UsageError
from buckeye.run.model_files import fetch_model
from buckeye.run.serve import served_model


def talk(model: str, prompt: str | None, *, temperature: float, max_tokens: int) -> None:
    """Answer `prompt` and return, or hold a conversation until an empty line or Ctrl-D."""
    asyncio.run(_talk(model, prompt, temperature, max_tokens))


async def _talk(model: str, prompt: str | None, temperature: float, max_tokens: int) -> None:
    path = fetch_model(model)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for input() to return
    async with served_model(path) as server:
        messages: list[dict[str, str]] = []
        while True:
            question = prompt or _ask()
            if not question:
                return
            messages.append({"role": "user", "content": question})
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
