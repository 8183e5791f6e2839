"""Errors that Buckeye raises on purpose.

    BuckeyeError              one short message for a person: what, where, what to do
    ├── UsageError            invalid input: flags, files, keys, values   (exit code 2)
    │   ├── ConfigError       a configuration file or flag; has every problem found
    │   └── EnvironmentNotFoundError   an environment id that does not exist
    ├── InferenceError        an engine or its server replied incorrectly, or not at all
    │   ├── PortTakenError    its port is in use
    │   └── PromptTooLongError   the first prompt of a rollout does not fit
    ├── TransportError        a batch or a weights directory is missing, incomplete or of another run
    ├── CheckpointError       no checkpoint to resume from, or an invalid one
    ├── StoreError            an object store is unreachable, or refuses
    ├── DiskFullError         the disk is full, and the wait for space has ended
    ├── RemoteError           a remote machine, its connection or its provider failed
    │   ├── AccountError      the account does not permit it: key, rights or money
    │   ├── OfferRefusedError an offered machine is unavailable; another one may be available
    │   └── PodGoneError      a pod no longer exists, or will never be ready
    └── RunError              a process of a run ended or stalled
        └── FinalRunError     a restart would fail the same way

A bad rollout is data (`Outcome.error`), not an exception. Assertions are for programmers.
All errors can be pickled, so they can pass between processes.
"""

from __future__ import annotations

DEBUG_VARIABLE = "BUCKEYE_DEBUG"
"""Environment variable: 1 prints errors with their traceback."""

FOREIGN_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""Errors that code of others may raise where Buckeye calls it: `exit()` there ends the call, not the run."""


class BuckeyeError(Exception):
    """Base of all errors for people to read. `exit_code` is the exit code of a command; `final` means that a
    restart cannot fix it.
    """

    code = "failed"
    exit_code = 1
    final = False


class UsageError(BuckeyeError):
    """Invalid input of the caller; nothing was started."""

    code = "usage"
    exit_code = 2
    final = True


class ConfigError(UsageError):
    """Configuration that cannot be used. The message lists every problem found, one per paragraph."""

    code = "config"


class EnvironmentNotFoundError(UsageError):
    """No installed environment has the id; the message has the install command."""

    code = "environment-not-found"


class InferenceError(BuckeyeError):
    """An inference server refused a request, replied with invalid data, or did not reply in time."""

    code = "inference"


class PortTakenError(InferenceError):
    """A server cannot listen on its port, because another process does."""

    code = "port-taken"


class PromptTooLongError(InferenceError):
    """The first prompt of a rollout is longer than the context."""

    code = "prompt-too-long"


class TransportError(BuckeyeError):
    """A batch or weights directory is missing, incomplete, corrupted, or from another run."""

    code = "transport"


class CheckpointError(BuckeyeError):
    """No usable checkpoint exists where one was requested."""

    code = "checkpoint"


class StoreError(BuckeyeError):
    """An object store is unreachable, or refuses. `denied` means that a retry is useless."""

    code = "store"

    def __init__(self, message: str, denied: bool = False) -> None:
        super().__init__(message, denied)
        self.denied = denied

    def __str__(self) -> str:
        return str(self.args[0])


class DiskFullError(BuckeyeError):
    """A disk is full, and the wait for space has ended."""

    code = "disk-full"
    final = True


class RemoteError(BuckeyeError):
    """A remote machine, the connection to it, or its provider has failed."""

    code = "remote"


class AccountError(RemoteError):
    """The account at a provider does not permit it: key, rights or money."""

    code = "account"
    final = True


class OfferRefusedError(RemoteError):
    """An offered machine is unavailable, or not as offered. Another one may be available."""

    code = "offer-refused"


class PodGoneError(RemoteError):
    """A pod no longer exists, or will never be ready."""

    code = "pod-gone"


class RunError(BuckeyeError):
    """A process of a run failed, stalled, or could not be started."""

    code = "run"


class FinalRunError(RunError):
    """A run failed for a reason that a restart does not change."""

    code = "run-final"
    final = True
