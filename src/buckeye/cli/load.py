"""Load the configuration of a command whose flags are settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeVar

from buckeye.base.process import idle_spins
from buckeye.config.adapter import start_from_adapter
from buckeye.config.load import load_with_warnings
from buckeye.config.shared import BaseConfig

T = TypeVar("T", bound=BaseConfig)

_COMPUTES = {"serve": True, "sft": True, "trainer": False}
"""Commands that compute with torch. False if other processes of a run compute on the same cores."""


def load(model: type[T], argv: list[str], program: str) -> T:
    """Return the configuration from a command line. If `argv` asks for help, print the help and exit.

    Raises ConfigError.
    """
    configure_libraries(program)
    from buckeye.cli.settings_help import asks_for_help, show_help

    if asks_for_help(argv):
        show_help(model, program, argv)
        sys.exit(0)
    config, warnings = load_with_warnings(model, argv)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return config


def configure_libraries(program: str) -> None:
    """Set variables that libraries read when torch is imported. Call this function before that import.

    By default, oneDNN caches half a megabyte for every shape of a matrix product, and batches of varying
    length have dozens of shapes. A cache miss costs no measurable time.
    """
    if program in _COMPUTES:
        os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=_COMPUTES[program])
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")  # read by ideep, between torch and oneDNN


def with_local_model(config: T) -> T:
    """Return the configuration with the local directory of its model; download the model if necessary."""
    from buckeye.launch.preflight.model import fetch_model

    return with_model_directory(config, fetch_model(config.model.name))  # type: ignore[attr-defined]


def with_run_weights(config: T) -> T:
    """Return the configuration with the newest weights as `model.name`, or their base, if that is a run."""
    from buckeye.launch.preflight.model import resolve_run

    name = config.model.name  # type: ignore[attr-defined]
    found = resolve_run(name, at="model.name")
    return config if found == name else start_from_adapter(with_model_directory(config, Path(found)))


def with_model_directory(config: T, directory: Path) -> T:
    """Return the configuration with `directory` as `model.name`."""
    model = config.model.model_copy(update={"name": str(directory)})  # type: ignore[attr-defined]
    return config.model_copy(update={"model": model})
