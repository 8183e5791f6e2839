"""A configuration as text that reads back as the same configuration."""

from __future__ import annotations

import json

from buckeye.config.base import BaseConfig


def to_json(config: BaseConfig) -> str:
    """JSON for `@ file.json`; explicit None included."""
    return json.dumps(config.model_dump(mode="json"), indent=1, ensure_ascii=False)
