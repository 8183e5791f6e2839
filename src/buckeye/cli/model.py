"""`buckeye model tiny`, `buckeye chat` and `buckeye export`: create, try and export a model."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.terminal import status_line
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_served_model
from buckeye.launch.serve import served_model
from buckeye.runs.export import ExportRequest, export_model
from buckeye.workers.loading import load_environment


def model_tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write the model; must not exist yet.")],
    env: Annotated[str, typer.Option(help="Environment whose train prompts shape the tokenizer.")] = (
        "harleycooper/dakota1890"
    ),
    corpus: Annotated[
        Path | None, typer.Option(help="A text file to train the tokenizer on, instead of an environment.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=300, help="Size of the vocabulary.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    hidden: Annotated[int, typer.Option(min=32, help="Hidden size; a multiple of 64.")] = 256,
    max_length: Annotated[int, typer.Option(min=64, help="Context length in tokens.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Make a small Qwen3-architecture model with random weights and a byte-level BPE tokenizer."""
    from buckeye.trainer.model.tiny import TinySize, make_tiny_model

    size = TinySize(vocab_size=vocab_size, layers=layers, hidden=hidden, max_length=max_length)
    parameters = make_tiny_model(directory, texts=_texts(env, corpus), size=size, seed=seed)
    typer.echo(f"{directory}: Qwen3, {parameters:,} parameters, random weights")


def _texts(env: str, corpus: Path | None) -> list[str]:
    if corpus is not None:
        try:
            return corpus.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--corpus: {corpus} cannot be read: {error}") from None
    tasks = load_environment(env).tasks("train")
    return [str(m["content"]) for i in range(min(len(tasks), 2000)) for m in tasks[i].messages]


def chat(
    path: Annotated[
        str, typer.Argument(help="A directory with a model or an adapter, or a Hugging Face id.")
    ],
    prompt: Annotated[str | None, typer.Argument(help="Ask this one question and leave.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 256,
) -> None:
    """Talk to a model in the terminal."""
    asyncio.run(_talk(path, prompt, temperature, max_tokens))


async def _talk(model: str, prompt: str | None, temperature: float, max_tokens: int) -> None:
    """Answer `prompt` and return, or chat until the user leaves."""
    with status_line(f"fetching {model}"):
        path = fetch_served_model(model)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's handler waits for input() to return
    async with AsyncExitStack() as stack:
        with status_line(f"waiting for a server of {model} to start"):
            server = await stack.enter_async_context(served_model(path))
        messages: list[dict[str, str]] = []
        if prompt is None:
            typer.echo("/exit, an empty line or Ctrl-D leaves.", err=True)
        while True:
            question = prompt or _ask()
            if question in _LEAVE:
                return
            messages.append({"role": "user", "content": question})
            with status_line(f"waiting for the reply of {model}"):
                reply = await server.chat(messages, temperature=temperature, max_tokens=max_tokens)
            typer.echo(reply)
            messages.append({"role": "assistant", "content": reply})
            if prompt is not None:
                return


_LEAVE = ("", "/exit", "/quit")


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError:
        raise UsageError("the input is not UTF-8") from None


def export(
    run: Annotated[Path, typer.Argument(help="Output directory of `rl` or `sft`.")],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|N",
            help="Which checkpoint. Default: the best by evaluation; the last if none was evaluated.",
        ),
    ] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Export a complete model, not the adapter alone.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Also upload it to the Hugging Face hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the new repository of --push a private one.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="A new directory. Default: RUN/exports/step_N; merged, step_N-merged."
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model with a model card, and verify it."""
    request = ExportRequest(
        run=run, step=step, merge_lora=merge_lora, output=output, push=push, private=private
    )
    exported = export_model(request, typer.echo)
    if exported.url is not None:
        typer.echo(exported.url)
    typer.echo(f"talk to it: buckeye chat {exported.directory}")


COMMANDS = {"model tiny": model_tiny, "chat": chat, "export": export}
