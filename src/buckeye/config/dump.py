"""Handing a configuration to another process."""

from __future__ import annotations

import json

from buckeye.config.base import BaseConfig


def to_json(config: BaseConfig) -> str:
    """The whole configuration as JSON, which `@ FILE.json` reads back to an equal object; None is null."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
