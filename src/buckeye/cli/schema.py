"""`rl schema [DIR]`: print the JSON Schemas of all configuration files."""

from __future__ import annotations

import json
from pathlib import Path

from buckeye.base.storage import write_file
from buckeye.cli.help import show_page
from buckeye.cli.settings_help import asks_for_help
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.schema import json_schema
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.mcp.config import gym_schema

_DESCRIPTION = (
    "Print the JSON Schemas of all configuration files as one object. With DIR, write one file each, for "
    "editors that complete and check keys."
)


def schema(argv: list[str]) -> int:
    """Print the JSON Schemas of all configuration files, or write one file each."""
    if asks_for_help(argv):
        show_page("usage: rl schema [DIR]", _DESCRIPTION, {})
        return 0
    schemas = {name: json_schema(model) for name, model in configurations().items()} | {"gym": gym_schema()}
    if not argv:
        print(json.dumps(schemas, indent=1))
        return 0
    if len(argv) > 1 or argv[0].startswith("-"):
        message = f"`rl schema`: unexpected arguments: {' '.join(argv)}"
        raise UsageError(message, code="BK-CLI-ARGUMENT", hint="Write `rl schema` or `rl schema DIR`")
    directory = Path(argv[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in schemas.items():
        path = directory / f"{name}.schema.json"
        write_file(path, json.dumps(content, indent=1) + "\n")
        print(path)
    return 0


def configurations() -> dict[str, type[BaseConfig]]:
    """Return the settings of each kind of configuration file, by its name."""
    return {
        "rl": RLConfig,
        "trainer": TrainerConfig,
        "orchestrator": OrchestratorConfig,
        "inference": InferenceConfig,
        "sft": SFTConfig,
    }


COMMANDS = {"rl schema": schema}
