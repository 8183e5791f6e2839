"""Errors that Buckeye raises on purpose.

    BuckeyeError              one short message for a person: what, where, what to do
    ├── UsageError            invalid input: flags, files, keys, values   (exit code 2)
    │   ├── ConfigError       an invalid configuration file or flag; lists every problem found
    │   └── EnvironmentNotFoundError   an environment id that does not exist
    ├── InferenceError        an engine or its server replied incorrectly, or not at all
    │   ├── PortTakenError    its port is in use
    │   └── PromptTooLongError   the first prompt of a rollout does not fit
    ├── TransportError        a batch or a weights directory is missing, incomplete or of another run
    ├── CheckpointError       no checkpoint to resume from, or an invalid one
    ├── StoreError            an object store is unreachable, or refuses
    ├── DiskFullError         the disk is full, and the wait for space has ended
    ├── RemoteError           a remote machine, its connection or its provider failed
    │   ├── AccountError      the key of an account is invalid or lacks rights, or its balance is empty
    │   ├── OfferRefusedError an offered machine is unavailable; another one may be available
    │   └── PodGoneError      a pod no longer exists, or will never be ready
    └── RunError              a process of a run ended or stalled
        └── FinalRunError     a restart would fail the same way

A bad rollout is data (`Outcome.error`), not an exception. Assertions are for programmers.
All errors can be pickled, so they can pass between processes.
"""

from __future__ import annotations

import copy
from typing import Self

DEBUG_VARIABLE = "BUCKEYE_DEBUG"
"""Environment variable: 1 prints errors with their traceback."""

THIRD_PARTY_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""Errors that third-party code may raise where Buckeye calls it. Its `exit()` must not end the run."""


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text (at most 300 characters), or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


class BuckeyeError(Exception):
    """Base of all errors for people to read.

    `exit_code` is the exit code of a command; `final` means that a restart cannot fix it. `code` names the
    kind of the error: a section of `explanations.md`, which `buckeye explain CODE` prints.

    Args:
        message: what failed, and why.
        code: replaces the code of the class.
        at: where: `FILE:LINE (KEY)`, a flag, or an address. None if the message names it.
        hint: what to do: a sentence in the imperative.
    """

    code: str = "BK-FAILED"
    exit_code = 1
    final = False

    def __init__(
        self, message: str, *, code: str | None = None, at: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.at, self.hint = message, at, hint
        if code is not None:
            self.code = code

    def prefixed(self, prefix: str) -> Self:
        """Return this error with `prefix: ` before its message; its other fields stay."""
        error = copy.copy(self)
        error.message = f"{prefix}: {self.message}"
        error.args = (error.message, *self.args[1:])
        return error

    def __str__(self) -> str:
        """Return message, place and hint as one text, for logs and for other messages."""
        text = f"{self.at}: {self.message}" if self.at else self.message
        if not self.hint:
            return text
        end = "\n" if "\n" in text else ". "
        return f"{text.rstrip().removesuffix('.')}{end}{_sentence(self.hint)}"

    @property
    def text(self) -> str:
        """The error as a terminal shows it: message, place, hint, and the command that explains its code."""
        lines = [f"error: {self.message}"]
        lines += [f"  at {self.at}"] if self.at else []
        lines += [f"hint: {_sentence(self.hint)}"] if self.hint else []
        return "\n".join([*lines, f"more: buckeye explain {self.code}"])


def _sentence(hint: str) -> str:
    """Return a hint that begins with a capital letter."""
    return hint[:1].upper() + hint[1:]


class UsageError(BuckeyeError):
    """Invalid input of the caller; nothing was started."""

    code = "BK-USAGE"
    exit_code = 2
    final = True


class ConfigError(UsageError):
    """Configuration that cannot be used. The message lists every problem found, one per line."""

    code = "BK-CONFIG"


class EnvironmentNotFoundError(UsageError):
    """No installed environment has the id; the message has the install command."""

    code = "BK-ENV-UNKNOWN"


class InferenceError(BuckeyeError):
    """An inference server refused a request, replied with invalid data, or did not reply in time."""

    code = "BK-INFERENCE"


class PortTakenError(InferenceError):
    """A server cannot listen on its port, because another process does."""

    code = "BK-PORT-TAKEN"


class PromptTooLongError(InferenceError):
    """The first prompt of a rollout is longer than the context."""

    code = "BK-PROMPT-TOO-LONG"


class TransportError(BuckeyeError):
    """A batch or weights directory is missing, incomplete, corrupted, or from another run."""

    code = "BK-TRANSPORT"


class CheckpointError(BuckeyeError):
    """No usable checkpoint exists where one was requested."""

    code = "BK-CHECKPOINT"


class StoreError(BuckeyeError):
    """An object store is unreachable, or refuses. `denied` means that a retry is useless."""

    code = "BK-STORE"

    def __init__(self, message: str, *, denied: bool = False, hint: str | None = None) -> None:
        super().__init__(message, code="BK-STORE-DENIED" if denied else None, hint=hint)
        self.denied = denied


class DiskFullError(BuckeyeError):
    """A disk is full, and the wait for space has ended."""

    code = "BK-DISK-FULL"
    final = True


class RemoteError(BuckeyeError):
    """A remote machine, the connection to it, or its provider has failed."""

    code = "BK-REMOTE"


class AccountError(RemoteError):
    """A provider refuses a request: the key is invalid or lacks rights, or the balance is empty."""

    code = "BK-ACCOUNT"
    final = True


class OfferRefusedError(RemoteError):
    """An offered machine is unavailable, or not as offered. Another one may be available."""

    code = "BK-OFFER-REFUSED"


class PodGoneError(RemoteError):
    """A pod no longer exists, or will never be ready."""

    code = "BK-POD-GONE"


class RunError(BuckeyeError):
    """A process of a run failed, stalled, or could not be started."""

    code = "BK-RUN"


class FinalRunError(RunError):
    """A run failed for a reason that a restart does not change."""

    code = "BK-RUN"
    final = True
