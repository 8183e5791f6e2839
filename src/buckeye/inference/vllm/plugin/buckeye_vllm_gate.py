"""Middleware that makes vLLM's API server require the key on every route.

vLLM itself requires its key only on /v1 and /inference. Without this middleware, every client that reaches
the port could pause the server and replace its weights. Buckeye passes it to vLLM as `--middleware
buckeye_vllm_gate.Gate`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import buckeye_vllm_imports

_gate = buckeye_vllm_imports.load("request_gate")


class Gate(_gate.RequestGate):  # type: ignore[misc,name-defined]
    """`RequestGate` with the rules in BUCKEYE_VLLM_RULES, and the key in VLLM_API_KEY."""

    def __init__(self, app: Any) -> None:
        rules = json.loads(os.environ["BUCKEYE_VLLM_RULES"])
        rules = {name: tuple(value) if isinstance(value, list) else value for name, value in rules.items()}
        super().__init__(app, _gate.AccessRules(**rules, key=os.environ.get("VLLM_API_KEY")))
