"""The distributions beside the core, and the few places where the core asks one of them.

The core imports none of them. It names what it wants as `module:attribute`, and imports that when it is
asked for, so that each of them can be left out. (Names and not entry points: `buckeye --help` would have to
read the metadata of every installed distribution.)
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from buckeye.errors import UsageError

SATELLITES = {
    "buckeye_mcp": "buckeye-mcp",
    "buckeye_adapters": "buckeye-adapters",
    "buckeye_audit": "buckeye-audit",
    "buckeye_machines": "buckeye-machines",
}
"""The module of each, and the distribution to install."""


@cache
def is_there(satellite: str) -> bool:
    """Whether a satellite, by the name of its module, is installed."""
    return importlib.util.find_spec(satellite) is not None


@cache
def folders() -> tuple[str, ...]:
    """Where the code of the core and of the satellites is."""
    specs = [importlib.util.find_spec(module) for module in ("buckeye", *SATELLITES)]
    return tuple(str(Path(str(spec.origin)).parent) for spec in specs if spec is not None)


def ask(target: str, what: str) -> Any:
    """The attribute that `target` names, as `buckeye_mcp.gateway.for_runs:run_gateways`.

    Raises UsageError, with the command that installs it, if its distribution is not there, saying `what`
    needs it.
    """
    module, _, attribute = target.partition(":")
    satellite = module.partition(".")[0]
    if not is_there(satellite):
        raise absent(satellite, what)
    return getattr(importlib.import_module(module), attribute)


def absent(satellite: str, what: str) -> UsageError:
    """What to say to somebody who lacks a satellite."""
    from buckeye.base.distribution import install_command

    name = SATELLITES[satellite]
    extra = name.removeprefix("buckeye-")
    return UsageError(f"{what} needs {name}, which is not installed. Install it: {install_command(extra)}")
