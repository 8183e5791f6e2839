"""`rl schema [DIR]`: print the JSON Schemas of all configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.storage import write_file
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.schema import json_schema
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.mcp.config import gym_schema


def schema(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder for one file per schema. Default: print them."),
    ] = None,
) -> None:
    """Print the JSON Schemas of all configuration files, for editors that complete and check keys."""
    schemas = {name: json_schema(model) for name, model in configurations().items()} | {"gym": gym_schema()}
    if directory is None:
        print(json.dumps(schemas, indent=1))
        return
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in schemas.items():
        path = directory / f"{name}.schema.json"
        write_file(path, json.dumps(content, indent=1) + "\n")
        print(path)


def configurations() -> dict[str, type[BaseConfig]]:
    """Return the settings of each kind of configuration file, by its name."""
    return {
        "rl": RLConfig,
        "trainer": TrainerConfig,
        "orchestrator": OrchestratorConfig,
        "inference": InferenceConfig,
        "sft": SFTConfig,
    }
