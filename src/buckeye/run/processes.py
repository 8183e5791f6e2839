"""Starting, watching and ending the processes of a plan on this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import RunError
from buckeye.process import INTERRUPTED
from buckeye.run.plan import Role, RoleKind

log = logging.getLogger(__name__)

_TERM_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Child:
    """A started role."""

    role: Role
    process: subprocess.Popen[bytes]
    stdout: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self.process.poll()


class Processes:
    """The children of a run. Each has its own session, so the terminal's Ctrl-C reaches only the launcher,
    and each ends with the launcher, however that one ends (`die_with_parent`)."""

    def __init__(self, output_dir: Path, env: Mapping[str, str]) -> None:
        self._output_dir = output_dir
        self._env = {**os.environ, **env, "BUCKEYE_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self.children: list[Child] = []

    def start(self, role: Role) -> Child:
        """Start one process; its stdout and stderr go to `logs/<log_name>.stdout`, appended if it is
        started again."""
        stdout = self._output_dir / "logs" / f"{role.log_name}.stdout"
        stdout.parent.mkdir(parents=True, exist_ok=True)
        with stdout.open("ab") as output:
            process = subprocess.Popen(
                role.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._env, **role.env},
                start_new_session=True,
            )
        child = Child(role, process, stdout)
        self.children.append(child)
        return child

    def of_kind(self, kind: str) -> list[Child]:
        return [child for child in self.children if child.role.kind == kind]

    def check(self, *kinds: RoleKind) -> None:
        """Raise RunError, with the last lines of its log, for the first child (of these kinds, if any are
        named) that failed or left too early."""
        for child in self.children:
            code = child.returncode
            if code is None or (kinds and child.role.kind not in kinds):
                continue
            if code != 0 or child.role.kind == "inference":
                raise RunError(obituary(child, code))

    def forget(self, child: Child) -> None:
        """A child that has ended is none any more; what is left of its session is killed."""
        _signal_session(child, signal.SIGKILL)
        self.children.remove(child)

    def finished(self) -> bool:
        """Whether the orchestrator and every trainer rank have ended with exit code 0."""
        working = [c for c in self.children if c.role.kind != "inference"]
        return all(child.returncode == 0 for child in working)

    def request_stop(self, children: Sequence[Child]) -> None:
        """Ask children to end by themselves (SIGTERM)."""
        for child in children:
            if child.running:
                _signal_session(child, signal.SIGTERM)

    def stop(self, children: Sequence[Child], grace: float = _TERM_GRACE_SECONDS) -> None:
        """SIGTERM; after `grace` seconds SIGKILL to the whole session. Returns when all have ended."""
        self.request_stop(children)
        deadline = time.monotonic() + grace
        while any(child.running for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for child in children:
            if child.running:
                log.warning("%s did not end within %.0f s of SIGTERM: killed", child.role.title, grace)
            _signal_session(child, signal.SIGKILL)  # also what is left of its session
            child.process.wait()

    def kill(self, child: Child) -> None:
        """End a child, and its session, without asking."""
        _signal_session(child, signal.SIGKILL)

    def stop_all(self) -> None:
        """End every child that still runs."""
        self.stop(self.children)


def _signal_session(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


def how_it_ended(child: Child, code: int) -> str:
    """`Inference 0 was ended by SIGKILL`."""
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (by someone, or by the kernel for want of memory)"
    elif code == INTERRUPTED:
        how = "was stopped from outside"
    elif code == 0:
        how = "ended although the run had not"
    else:
        how = f"failed with exit code {code}"
    return f"{child.role.title.capitalize()} {how}"


def obituary(child: Child, code: int) -> str:
    """How a child ended, with the last lines of its log."""
    lines = last_lines(child.stdout, 20)
    shown = "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"
    return f"{how_it_ended(child, code)}. Its last lines ({child.stdout}):\n{shown}"


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file, from its last 64 kB."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return file.read().decode(errors="replace").splitlines()[-count:]
