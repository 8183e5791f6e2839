"""Middleware inside vLLM's API server: Buckeye's gate in front of every route.

vLLM's own check covers only /v1 and /inference. The routes that pause it and replace its weights are open to
every client that reaches the port. Passed to vLLM as `--middleware buckeye_vllm_gate.Gate`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import buckeye_vllm_imports

_gate = buckeye_vllm_imports.load("request_gate")


class Gate(_gate.RequestGate):  # type: ignore[misc,name-defined]
    """Buckeye's gate, with the rules in BUCKEYE_VLLM_RULES and the key in VLLM_API_KEY."""

    def __init__(self, app: Any) -> None:
        rules = json.loads(os.environ["BUCKEYE_VLLM_RULES"])
        rules = {name: tuple(value) if isinstance(value, list) else value for name, value in rules.items()}
        super().__init__(app, _gate.AccessRules(**rules, key=os.environ.get("VLLM_API_KEY")))
