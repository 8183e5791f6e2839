"""The typer application: small commands with a few options each, and the list that `buckeye --help` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye import __version__
from buckeye.cli.auth import auth_app
from buckeye.cli.completion import LaunchCommand, install_completion, show_completion
from buckeye.cli.env import env_app
from buckeye.cli.env_image import env_build, env_push
from buckeye.cli.env_install import env_info, env_install, env_list, env_remove, env_shell
from buckeye.cli.env_report import env_report
from buckeye.cli.evaluate import evaluate
from buckeye.cli.export import export
from buckeye.cli.gateway import gateway
from buckeye.cli.hf import hf
from buckeye.cli.launch import COMMANDS
from buckeye.cli.node import node
from buckeye.cli.pages import Commands
from buckeye.cli.trust import trust
from buckeye.cli.vllm import vllm_app

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
env_app.command("trust")(trust)
env_app.command("report")(env_report)
env_app.command("install")(env_install)
env_app.command("list")(env_list)
env_app.command("info")(env_info)
env_app.command("shell")(env_shell)
env_app.command("remove")(env_remove)
env_app.command("build")(env_build)
env_app.command("push")(env_push)
app.command()(export)
app.command("eval")(evaluate)
app.command()(gateway)
app.command()(hf)
app.command()(node)


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
    from buckeye.trainer.tiny import TinySize, make_tiny_model

    size = TinySize(vocab_size=vocab_size, layers=layers, hidden=hidden, max_length=max_length)
    parameters = make_tiny_model(directory, texts=_texts(env, corpus), size=size, seed=seed)
    typer.echo(f"{directory}: Qwen3, {parameters:,} parameters, random weights")


def _texts(env: str, corpus: Path | None) -> list[str]:
    from buckeye.envs.registry import load_environment
    from buckeye.errors import UsageError

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
    from buckeye.cli.chat import talk

    talk(path, prompt, temperature=temperature, max_tokens=max_tokens)


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("outputs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
) -> None:
    """Train a small model on Dakota grammar from nothing, and show that it got better."""
    from buckeye.demo.main import run_demo

    run_demo(output_dir, seed=seed, show=typer.echo)
