"""`buckeye demo`: train a small model, and show that it got better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output_dir: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("outputs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
) -> None:
    """Train a small model on Dakota grammar from nothing, and show that it got better."""
    from buckeye.setup.demo.main import run_demo

    run_demo(output_dir, seed=seed, show=typer.echo)


COMMANDS = {"demo": demo}
