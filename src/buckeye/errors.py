"""Every error Buckeye raises on purpose.

    BuckeyeError              one short message for a person: what, where, what to do
    ├── UsageError            the caller's input is wrong: flags, files, keys, values   (exit code 2)
    │   ├── ConfigError       a configuration file or flag; carries every problem found
    │   └── EnvironmentNotFoundError   an environment id that resolves to nothing
    ├── InferenceError        an engine or its server answered wrongly, or not at all
    │   ├── PortTakenError    its port is in use
    │   └── PromptTooLongError   the first prompt of a rollout does not fit
    ├── TransportError        a batch or a weights directory is missing, torn or foreign
    ├── CheckpointError       nothing to resume from, or what is there cannot be trusted
    ├── StoreError            an object store cannot be reached, or refuses
    ├── DiskFullError         nothing was freed for so long that waiting has ended
    ├── RemoteError           a machine elsewhere, the way to it, or who rents it out has failed
    │   ├── AccountError      the key, its rights or the wallet are at fault
    │   ├── OfferRefusedError a machine that was offered cannot be had; another one may
    │   └── PodGoneError      a pod that was there is no more, or will never be ready
    └── RunError              a process of a run ended or stalled
        └── FinalRunError     and would do so again, however often it is started

A bad rollout is data (`Outcome.error`), not an exception. Assertions are for programmers.
All of them survive pickling, so they may cross a process border.
"""

from __future__ import annotations

DEBUG_VARIABLE = "BUCKEYE_DEBUG"
"""Set to 1, errors come with their traceback."""

FOREIGN_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""Errors that code of others may raise where Buckeye calls it: `exit()` there ends the call, not the run."""


class BuckeyeError(Exception):
    """Base of all errors meant to be read by a person. `exit_code` is what a command ends with; `final` says
    that starting the process again cannot mend it."""

    code = "failed"
    exit_code = 1
    final = False


class UsageError(BuckeyeError):
    """The caller's input is wrong; nothing was started."""

    code = "usage"
    exit_code = 2
    final = True


class ConfigError(UsageError):
    """A configuration that cannot be used. The message lists every problem found, one per paragraph."""

    code = "config"


class EnvironmentNotFoundError(UsageError):
    """No installed environment answers to the id; the message holds the install command."""

    code = "environment-not-found"


class InferenceError(BuckeyeError):
    """An inference server refused a request, answered nonsense, or did not answer in time."""

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
    """There is no usable checkpoint where one was asked for."""

    code = "checkpoint"


class StoreError(BuckeyeError):
    """An object store cannot be reached, or refuses. `denied` says that trying again is of no use."""

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
    """A machine elsewhere, the connection to it, or the service that rents it out has failed."""

    code = "remote"


class AccountError(RemoteError):
    """The account at a provider does not allow it: key, rights or money."""

    code = "account"
    final = True


class OfferRefusedError(RemoteError):
    """A machine that was offered cannot be had, or not as it was offered. Another one may."""

    code = "offer-refused"


class PodGoneError(RemoteError):
    """A pod does not exist any more, or will never be ready."""

    code = "pod-gone"


class RunError(BuckeyeError):
    """A process of a run failed, stalled, or could not be started."""

    code = "run"


class FinalRunError(RunError):
    """A run that has failed for a reason that another start does not change."""

    code = "run-final"
    final = True
