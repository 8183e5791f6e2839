"""The typer application: small commands with a few options each, and the list that `buckeye --help` shows."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from buckeye import __version__
from buckeye.cli.completion import LaunchCommand, install_completion, show_completion
from buckeye.cli.help import Commands
from buckeye.cli.launch import COMMANDS
from buckeye.errors import UsageError

# `buckeye auth`: which keys are known and from where, and a place to put one.

auth_app = Commands(help="Keys: which are known and from where; store one.", no_args_is_help=True)


@auth_app.command("status")
def auth_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every key: where it was found, and its ends. Looked up in the environment, then in `.env` of the
    project, then in `~/.buckeye/.env`."""
    from buckeye.base.keys import key_files, key_states
    from buckeye.cli.env_args import print_table

    states = key_states()
    if as_json:
        files = [str(path) for path in key_files()]
        typer.echo(json.dumps({"files": files, "keys": [asdict(state) for state in states]}))
        return
    print_table(
        ("name", "found in", "value", "for"),
        [(state.name, state.where or "not set", state.masked or "", state.purpose) for state in states],
    )


@auth_app.command("set")
def auth_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As HF_TOKEN or WANDB_API_KEY.")],
    value: Annotated[str | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Store a key for all projects of this user, in `~/.buckeye/.env`. The value is asked for, or read from a
    pipe: never write it into the command, which others can see."""
    from buckeye.base.keys import key_states, set_key

    if value is not None or "=" in name:
        plain = name.partition("=")[0]
        raise UsageError(
            "other users can see the words of a command, so the value is not one of them. Type\n"
            f"  buckeye auth set {plain}\n"
            "and then the value. If it was a real one, have it replaced where it is from"
        )
    path = set_key(name, _value(name))
    typer.echo(f"{path}: {name} is set")
    state = next((one for one in key_states() if one.name == name), None)
    if state is not None and state.where != str(path):
        typer.echo(f"warning: the one in {state.where} wins over it here", err=True)


def _value(name: str) -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(name, hide_input=True)).strip()
    return sys.stdin.read().strip()


# `buckeye export`: a checkpoint as a model that others can use.


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
    from buckeye.runs.export import ExportRequest, export_model

    request = ExportRequest(
        run=run, step=step, merge_lora=merge_lora, output=output, push=push, private=private
    )
    exported = export_model(request, typer.echo)
    if exported.url is not None:
        typer.echo(exported.url)
    typer.echo(f"talk to it: buckeye chat {exported.directory}")


# `buckeye vllm`: the environment that vLLM runs in.

vllm_app = Commands(help="Set up vLLM in an environment of its own.", no_args_is_help=True)


@vllm_app.command("install")
def install(
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="The build for CPUs or for CUDA. Default: as the machine."),
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="Where to make the environment. Default: Buckeye's cache.")
    ] = None,
) -> None:
    """Install vLLM beside this environment, so that its pins of torch and transformers meet nobody else's."""
    from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE, default_environment, install_vllm
    from buckeye.launch.preflight.devices import this_machine

    environment = path or default_environment()
    for_cpu = not this_machine().gpus if cpu is None else cpu
    found = install_vllm(environment, cpu=for_cpu, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{found.distribution} {found.version} is ready in {environment}")
    if path is not None:
        typer.echo(f"Tell the inference server of it: export {PYTHON_VARIABLE}={found.python}")


# `buckeye env`: environments. Most of its commands are those of satellites.

env_app = Commands(
    help="Environments: write one, see what its rewards are worth, share it, use those of others.",
    no_args_is_help=True,
)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="Small letters, digits and hyphens, as my-game.")],
    kind: Annotated[str, typer.Option(help="mcp: tools behind an MCP server; python: a class.")] = "mcp",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to; must not exist yet.")] = None,
) -> None:
    """Write a new environment that works: a project with tasks, tests, and something to change."""
    from buckeye.envs.template import new_environment

    place = folder or Path(name)
    for path in new_environment(name, kind, place):
        typer.echo(str(path))
    typer.echo(f"Next: read {place / 'README.md'}", err=True)


# The typer application: small commands with a few options each, and the list that `buckeye --help` shows.

app = Commands(
    name="buckeye",
    help="Reinforcement learning for language-model agents that works the first time.",
    no_args_is_help=True,
    add_completion=False,  # `_root` has it, for all programs
)
model_app = Commands(help="Make and inspect models.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(env_app, name="env")
app.add_typer(auth_app, name="auth")
app.add_typer(vllm_app, name="vllm")
app.command()(export)

_OFFERED = {
    "env check": "buckeye.evaluation",
    "env play": "buckeye.evaluation",
    "env trust": "buckeye.mcp",
    "env install": "buckeye.workers",
    "env list": "buckeye.workers",
    "env info": "buckeye.workers",
    "env shell": "buckeye.workers",
    "env remove": "buckeye.workers",
    "env build": "buckeye.mcp",
    "env push": "buckeye.mcp",
    "eval": "buckeye.evaluation",
    "gateway": "buckeye.mcp",
    "hf": "buckeye.mcp",
    "workers": "buckeye.workers",
    "demo": "buckeye.evaluation",
    "ui": "buckeye.ui",
}
"""Which satellite has which command, in its `commands.COMMANDS`."""
_OF_RUNS = {"workers"}  # which people do not type


for _words, _satellite in _OFFERED.items():
    _group = env_app if _words.startswith("env ") else app
    _group.offer(_words, f"{_satellite}.commands", hidden=_words in _OF_RUNS)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"buckeye {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    install: Annotated[
        bool,
        typer.Option(
            "--install-completion", callback=install_completion, is_eager=True, help="Complete in this shell."
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show-completion", callback=show_completion, is_eager=True, help="Print the script for it."
        ),
    ] = False,
) -> None:
    del version, install, show


def _listed(name: str) -> None:
    """Make a launch command appear in `--help`; `main` dispatches it before typer sees it."""

    def command() -> None:
        COMMANDS[name]()

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}  # they are configuration keys
    app.command(name=name, cls=LaunchCommand, help=COMMANDS[name].__doc__, context_settings=settings)(command)


for _name in COMMANDS:
    _listed(_name)


@model_app.command("tiny")
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
    from buckeye.envs.registry import load_environment

    if corpus is not None:
        try:
            return corpus.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--corpus: {corpus} cannot be read: {error}") from None
    tasks = load_environment(env).tasks("train")
    return [str(m["content"]) for i in range(min(len(tasks), 2000)) for m in tasks[i].messages]


@app.command()
def chat(
    path: Annotated[
        str, typer.Argument(help="A directory with a model or an adapter, or a Hugging Face id.")
    ],
    prompt: Annotated[str | None, typer.Argument(help="Ask this one question and leave.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 256,
) -> None:
    """Talk to a model in the terminal."""
    import asyncio

    asyncio.run(_talk(path, prompt, temperature, max_tokens))


async def _talk(model: str, prompt: str | None, temperature: float, max_tokens: int) -> None:
    """Answer `prompt` and return, or hold a conversation until an empty line or Ctrl-D."""
    from buckeye.base.terminal import status_line
    from buckeye.launch.preflight.model import fetch_served
    from buckeye.launch.serve import served_model

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
