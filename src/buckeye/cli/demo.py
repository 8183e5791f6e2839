"""`buckeye demo`: train a small model, and show that it improved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output_dir: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
) -> None:
    """Train a small model on Dakota grammar from random weights, and show that it improved."""
    from buckeye.setup.demo.main import run_demo

    run_demo(output_dir, seed=seed, show=typer.echo)
