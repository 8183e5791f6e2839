"""What can go wrong with an MCP server while a rollout is played.

    McpFault          the environment's own failure; the rollout has an error and no reward
    ├── StartError    the server could not be started or reached, or did not shake hands in time
    ├── SetupError    a call of `setup_tool` failed
    ├── ToolTimeout   a call gave no result within its deadline
    ├── SessionLost   the server ended, or closed the connection
    ├── OutputFlood   it wrote more than a session may
    ├── WorkdirFull   the rollout's folder holds more than it may
    ├── BadAnswer     what it answered is not the protocol, or not what it announced
    ├── ToolsChanged  a tool that the rollout needs is gone or takes other arguments
    └── EvaluateError a call of `evaluate_tool` failed, or it gave no usable reward

None of them is a mistake of the model; those are results that it reads. `stop_reason` names the kind where
outcomes are counted.
"""

from __future__ import annotations

from typing import ClassVar

from buckeye.errors import BuckeyeError


class McpFault(BuckeyeError):
    """Base of the failures above. The message says which server and what it wrote last."""

    stop_reason: ClassVar[str] = "environment_failed"


class StartError(McpFault):
    """The server could not be started or reached, or did not shake hands in time."""

    stop_reason = "start_failed"


class SetupError(McpFault):
    """A call of `setup_tool` failed."""

    stop_reason = "setup_failed"


class ToolTimeout(McpFault):
    """A call gave no result within its deadline."""

    stop_reason = "tool_timeout"


class SessionLost(McpFault):
    """The server ended, or closed the connection."""

    stop_reason = "session_lost"


class OutputFlood(McpFault):
    """The server wrote more than a session may."""

    stop_reason = "output_flood"


class WorkdirFull(McpFault):
    """The rollout's folder holds more than it may."""

    stop_reason = "workdir_full"


class BadAnswer(McpFault):
    """What the server answered is not the protocol, or not what it announced."""

    stop_reason = "bad_answer"


class ToolsChanged(McpFault):
    """A tool that the rollout needs is gone or takes other arguments."""

    stop_reason = "tools_changed"


class EvaluateError(McpFault):
    """A call of `evaluate_tool` failed, or it gave no usable reward."""

    stop_reason = "evaluate_failed"
