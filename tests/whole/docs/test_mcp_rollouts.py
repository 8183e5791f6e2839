"""The documents of MCP rollouts and of `buckeye eval` name what there is."""

import re
from typing import get_args

from tests.places import ROOT

from buckeye.cli.typed import typer_command
from buckeye.mcp.client.errors import McpFault
from buckeye.mcp.environment import load_environment
from buckeye.mcp.rollout import StopReason

DOCS = ROOT / "docs"


def named(text):
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_stop_reason_is_explained():
    text = (DOCS / "mcp-rollouts.md").read_text(encoding="utf-8")
    faults = {fault.stop_reason for fault in McpFault.__subclasses__()}
    assert len(faults) == 8
    assert set(get_args(StopReason)) | faults <= named(text)


def test_every_argument_of_the_environment_is_explained():
    text = (DOCS / "mcp-rollouts.md").read_text(encoding="utf-8")
    assert set(load_environment.__annotations__) - {"return"} <= named(text)


def test_every_option_that_the_document_names_exists():
    text = (DOCS / "eval.md").read_text(encoding="utf-8")
    options = {name for param in typer_command("eval").params for name in param.opts}
    used = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*|-[a-z])\b", text))
    assert used
    assert used <= options
