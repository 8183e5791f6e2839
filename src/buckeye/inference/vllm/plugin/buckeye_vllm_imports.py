"""Loader of Buckeye's standard-library-only files, for a Python without Buckeye."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_BUCKEYE = Path(__file__).parents[3] / "base"


def load(name: str) -> ModuleType:
    """Load the module `buckeye.base.NAME` by its file, without its package."""
    module_name = f"buckeye_vllm_{name}_of_ours"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, _BUCKEYE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # before it runs: dataclasses look up their module
        spec.loader.exec_module(module)
    return sys.modules[module_name]
