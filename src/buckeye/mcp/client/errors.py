"""Errors of an MCP server during a rollout.

    McpEnvironmentError        the environment failed; the rollout has an error and no reward
    ├── StartError             the server could not be started or reached, or the handshake timed out
    │   └── TaskError          the task or the configuration does not fit this machine or its servers
    │       └── ConfigurationError  an action of the configuration has a tool that no server has
    ├── SetupError             a call of `setup_tool` failed
    ├── ToolTimeoutError       a call returned no result within its deadline
    ├── SessionLostError       the server exited, or closed the connection
    │   └── WorkdirFullError   the rollout's folder exceeded its size limit
    ├── OutputFloodError       the server exceeded the output limit of a session
    ├── BadAnswerError         the server's response violates the protocol or the announced schema
    ├── ToolsChangedError      a tool that the rollout needs is missing or takes other arguments
    └── EvaluateError          a call of `evaluate_tool` failed, or returned no usable reward

A mistake of the model is not an error, but the result of the call. If a call fails with an error of the list
above, Buckeye starts new servers for the task, to find out whether the call or the environment is the cause.
If the new servers work, the call is the cause, and the error becomes the result of the call. `stop_reason` is
the name of the error in counts of outcomes. The model reads `to_model` after the name of the tool.
"""

from __future__ import annotations

import errno
from typing import ClassVar

from buckeye.envs.stdlib_only.outcomes import Boundary
from buckeye.errors import BuckeyeError

_TRANSIENT = frozenset({
    errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ESTALE, errno.ETIMEDOUT, errno.ETXTBSY,
})  # fmt: skip


class McpEnvironmentError(BuckeyeError):
    """Base class of the environment's failures. The message has the server's name and its last output."""

    code = "BK-MCP-SERVER"
    stop_reason: ClassVar[str] = "environment_failed"
    to_model: ClassVar[str] = "it cannot be called"
    boundary: ClassVar[Boundary | None] = None
    exit_status: str = ""
    """Exit code or signal of the server's process, such as `exit code 3`. The model does not read it."""


class StartError(McpEnvironmentError):
    """The server could not be started or reached, or the handshake timed out."""

    code = "BK-MCP-START"
    stop_reason = "start_failed"


class TaskError(StartError):
    """The task or the configuration does not fit its servers or this machine. No retry can succeed."""

    code = "BK-ENV-TASKS"
    final = True
    boundary: ClassVar[Boundary | None] = "task"


class ConfigurationError(TaskError):
    """An action of the configuration has a tool that no server has: other tasks fail the same way."""

    boundary = "config"


class SetupError(McpEnvironmentError):
    """A call of `setup_tool` failed."""

    code = "BK-MCP-ACTION"
    stop_reason = "setup_failed"


class ToolTimeoutError(McpEnvironmentError):
    """A call returned no result within its deadline."""

    stop_reason = "tool_timeout"
    to_model = "it returned no result in time"


class SessionLostError(McpEnvironmentError):
    """The server exited, or closed the connection."""

    stop_reason = "session_lost"
    to_model = "its server exited"


class OutputFloodError(McpEnvironmentError):
    """The server exceeded the output limit of a session."""

    stop_reason = "output_flood"
    to_model = "its output was too large, so its server was killed"


class WorkdirFullError(SessionLostError):
    """The rollout's folder exceeded its size limit, so its servers were killed."""

    stop_reason = "workdir_full"
    to_model = "the folder exceeded its size limit, so its server was killed"


class BadAnswerError(McpEnvironmentError):
    """The server's response violates the protocol or the announced schema."""

    stop_reason = "bad_answer"
    to_model = "its result cannot be used"


class ToolsChangedError(McpEnvironmentError):
    """A tool that the rollout needs is missing or takes other arguments."""

    stop_reason = "tools_changed"


class EvaluateError(McpEnvironmentError):
    """A call of `evaluate_tool` failed, or returned no usable reward."""

    code = "BK-MCP-ACTION"
    stop_reason = "evaluate_failed"


def is_transient(error: BaseException) -> bool:
    """Return True for an error of the operating system that a retry may avoid, such as a full disk."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT
