"""Create and start a job on another machine, and send it requests. A job is one start of `rl`."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from buckeye.base.json_lines import printable
from buckeye.errors import RemoteError
from buckeye.remote.base import SshTarget
from buckeye.remote.connection import LostConnectionError, SshConnection
from buckeye.run_files.known_runs import RemoteJob

_ANSWER_SECONDS = 60.0
_MAX_JSON_BYTES, _MAX_SHOWN = 64 * 2**20, 1000

_START = """
umask 077
trap '' HUP
cd "$1" || exit 1
if [ -e pid ]; then cat >/dev/null; exit 0; fi
if ! cat > env || [ "$(wc -c < env)" -ne "$5" ]; then
  rm -f env
  echo "the keys arrived incomplete: the connection was cut, or the disk is full" >&2
  exit 1
fi
touch heartbeat
if command -v tmux >/dev/null; then
  tmux -L "$2" new-session -d -s run sh -c "$3" >/dev/null 2>&1 && exit 0
fi
setsid nohup sh -c "exec $4" </dev/null >>wrapper.log 2>&1 &
"""


def project_folder(job: RemoteJob) -> str:
    """Return the working directory of a job."""
    return f"{job.folder}/project"


def terminal_argv(target: SshTarget, identity_file: str | None, known_hosts: str, job_id: str) -> list[str]:
    """Return the ssh command that opens the terminal of a job (tmux)."""
    key = ["-i", identity_file] if identity_file else []
    hosts = ["-o", f"UserKnownHostsFile={known_hosts}", "-o", "StrictHostKeyChecking=accept-new"]
    login = ["ssh", "-t", *key, "-p", str(target.port), *hosts, f"{target.user}@{target.host}"]
    return [*login, "tmux", "-L", _tmux_socket(job_id), "attach"]


def _tmux_socket(job_id: str) -> str:
    return f"buckeye-{job_id}"


async def remote_home(link: SshConnection) -> str:
    """Return the home directory on the other machine."""
    found = await link.run(["sh", "-c", 'printf %s "$HOME"'])
    home = found.stdout.decode(errors="replace")
    if found.code != 0 or not home.startswith("/"):
        raise RemoteError(
            f"cannot find the home directory on {link.target}: {found.text()}", code="BK-REMOTE-HOST"
        )
    return home


async def prepare(link: SshConnection, job: RemoteJob, settings: Mapping[str, Any]) -> None:
    """Create the folder of a job, which only its user can read, and write `settings` to `job.json`."""
    script = 'umask 077; mkdir -p "$1" && cat > "$1/.job.json.new" && mv "$1/.job.json.new" "$1/job.json"'
    await _must(link, ["sh", "-c", script, "sh", job.folder], json.dumps(settings).encode())


async def start(link: SshConnection, job: RemoteJob, secrets: Mapping[str, str]) -> None:
    """Start a job, unless it was started before.

    One remote program reads the keys from its standard input, writes them to a file that only the user of the
    job can read, and starts the job. The job reads the file and deletes it. If the connection is lost
    after the keys have arrived, the program still starts the job, so the keys do not stay in the file. If the
    keys arrive incomplete, the program deletes them, and RemoteError is raised.
    """
    keys = json.dumps(secrets).encode()
    wrapper = shlex.join([job.python, "-P", "-m", "buckeye.remote.pod.wrapper", job.folder])
    shown = shlex.join(["tail", "-n", "+1", "-F", f"{job.folder}/log"])
    terminal = (
        f'{wrapper} 2>>wrapper.log & wrapper=$!; touch "{job.folder}/log"; '
        f"{shown} --pid=$wrapper 2>/dev/null & wait $wrapper"
    )
    words = [job.folder, _tmux_socket(job.id), terminal, wrapper, str(len(keys))]
    await _must(link, ["sh", "-c", _START, "sh", *words], keys)


async def forget_secrets(link: SshConnection, job: RemoteJob) -> None:
    """Delete the file with the keys, if the job has not deleted it."""
    await _must(link, ["rm", "-f", f"{job.folder}/env"])


async def _must(link: SshConnection, argv: list[str], data: bytes = b"") -> None:
    done = await link.run(argv, data=data)
    if done.code != 0:
        raise RemoteError(f"cannot start the job on {link.target}: {done.text()}", code="BK-REMOTE-JOB")


async def read_answer(stdout: Any, *, longest: int = 0) -> tuple[dict[str, Any], bytes]:
    """Read a response, and return its JSON object and its bytes.

    Raises ValueError for more than `longest` bytes.
    """
    lengths = await stdout.readexactly(16)
    json_size, size = int(lengths[:8], 16), int(lengths[8:], 16)
    if json_size > _MAX_JSON_BYTES or size > longest:
        raise ValueError(f"too long: {json_size} bytes of JSON and {size} bytes of content")
    said = json.loads(await stdout.readexactly(json_size))
    if not isinstance(said, dict):
        raise ValueError("a response that is not an object")
    return said, await stdout.readexactly(size)


class AgentClient:
    """Client of an agent on the other machine. The agent handles one request at a time."""

    def __init__(self, link: SshConnection, process: Any) -> None:
        self._link, self._process = link, process

    async def request(self, question: str, **words: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return the JSON object and the bytes of the response.

        Raises LostConnectionError without a response, FileNotFoundError for a deleted file, and RemoteError
        if the request fails.
        """
        process = self._process
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                process.stdin.write(json.dumps({"ask": question, **words}).encode() + b"\n")
                said, content = await read_answer(process.stdout, longest=words.get("length", 0))
        except TimeoutError:
            self._link.close()
            raise LostConnectionError(f"{self._link.target} does not respond") from None
        except (ValueError, RecursionError) as error:
            raise RemoteError(
                f"invalid response of {self._link.target}: {error}", code="BK-REMOTE-JOB"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, EOFError) as error:
            raise await self._ended(error) from None
        if "error" in said:
            if str(said["error"]).startswith("FileNotFoundError"):
                raise FileNotFoundError(said["error"])
            raise RemoteError(
                f"{self._link.target}: {printable(str(said['error'])[:_MAX_SHOWN])}", code="BK-REMOTE-JOB"
            )
        return said, content

    async def _ended(self, error: BaseException) -> RemoteError:
        """Return the exception to raise after the agent has ended."""
        words = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        if (self._process.exit_status or 0) > 0 and words:
            return RemoteError(f"{self._link.target}: {words[-1]}", code="BK-REMOTE-JOB")
        self._link.close()  # the agent may have been killed because the machine shuts down: reconnect
        return LostConnectionError(f"the connection to {self._link.target} was lost: {error}")


@asynccontextmanager
async def open_agent(link: SshConnection, job: RemoteJob) -> AsyncIterator[AgentClient]:
    """Start an agent for requests about a job, and yield its client."""
    async with link.program([job.python, "-P", "-m", "buckeye.remote.pod.agent", job.folder]) as process:
        yield AgentClient(link, process)
