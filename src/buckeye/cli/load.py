"""Load the configuration of a command whose flags are settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeVar

from buckeye.base.process import idle_spins
from buckeye.config.load import load_with_warnings
from buckeye.config.shared import BaseConfig

T = TypeVar("T", bound=BaseConfig)

_COMPUTES = {"serve": True, "sft": True, "trainer": False}
"""The commands that compute, and whether each has the cores to itself unless a run tells it otherwise."""


def load(model: type[T], argv: list[str], program: str) -> T:
    """Return the configuration that a command line makes; print its help and exit where that was asked for.

    Raises ConfigError.
    """
    tune_libraries(program)
    from buckeye.cli.settings_help import asks_for_help, show_help

    if asks_for_help(argv):
        show_help(model, program, argv)
        sys.exit(0)
    config, warnings = load_with_warnings(model, argv)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return config


def tune_libraries(program: str) -> None:
    """Set what libraries read when torch is imported, which no command has done yet.

    oneDNN keeps half a megabyte for every shape of a product, of which a batch of other lengths has dozens;
    to prepare it again costs nothing that can be measured.
    """
    if program in _COMPUTES:
        os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=_COMPUTES[program])
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")  # of ideep, between torch and oneDNN


def with_local_model(config: T) -> T:
    """Replace `model.name` by the local directory of the model, fetching it if need be."""
    from buckeye.launch.preflight.model import fetch_model

    return of_model(config, fetch_model(config.model.name))  # type: ignore[attr-defined]


def of_model(config: T, directory: Path) -> T:
    """Replace `model.name` by a directory."""
    model = config.model.model_copy(update={"name": str(directory)})  # type: ignore[attr-defined]
    return config.model_copy(update={"model": model})
