"""Loader of modules of Buckeye that import no other module of Buckeye, for a Python without Buckeye."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_BUCKEYE = Path(__file__).parents[3]


def load(name: str, *, room: str = "base") -> ModuleType:
    """Load the file of the module `buckeye.ROOM.NAME`, without importing the package `buckeye`."""
    module_name = f"buckeye_vllm_{name}_of_ours"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, _BUCKEYE / room / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look up their module while it is executed
        spec.loader.exec_module(module)
    return sys.modules[module_name]
