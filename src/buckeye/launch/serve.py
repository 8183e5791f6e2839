"""Start an inference server for `chat` and `eval`, and end it after use."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.process import PYTHON
from buckeye.config.inference import InferenceConfig
from buckeye.config.load import to_json
from buckeye.errors import RunError
from buckeye.inference.client import InferenceClient
from buckeye.launch.exit_reason import OomKills, exit_error_code, explain_exit
from buckeye.launch.plan import Role
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.ports import Ports
from buckeye.launch.processes import Processes

_START_SECONDS = 300.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A running inference server for one model. `base_url` ends in `/v1`."""

    base_url: str
    api_key: str
    model: str


@asynccontextmanager
async def served_model(path: Path, *, config: InferenceConfig | None = None) -> AsyncIterator[ServedModel]:
    """Start an inference server for the model at `path` on a free loopback port, and end it after the block.

    If the server ends before the block, the block is cancelled and RunError is raised with the reason.
    """
    key = secrets.token_urlsafe(24)
    with closing(Ports()) as ports, tempfile.TemporaryDirectory(prefix="buckeye-serve-") as scratch:
        (port,), directory, oom_kills = ports.choose(1), Path(scratch), OomKills.read()

        def check() -> None:
            for child in processes.children:
                child.heartbeats.read(time.monotonic())  # empty the pipe, so that it does not fill up
                if child.returncode is not None:
                    text = explain_exit(child, child.returncode, oom_kills, directory)
                    raise RunError(text, code=exit_error_code(child))

        base = config or InferenceConfig()
        settings = base.model_copy(
            update={
                "model": base.model.model_copy(update={"name": str(path)}),
                "server": base.server.model_copy(update={"port": port}),
                "output_dir": directory,
            }
        )
        (directory / "inference.json").write_text(to_json(settings), encoding="utf-8")
        processes = Processes(
            directory,
            {
                "BUCKEYE_INFERENCE_KEY": key,
                "BUCKEYE_THREADS": os.environ.get("BUCKEYE_THREADS", str(this_machine().cores)),
            },
        )
        role = Role(
            kind="inference",
            index=0,
            argv=(*PYTHON, "-m", "buckeye", "serve", "@", str(directory / "inference.json")),
            port=port,
        )
        try:
            processes.start(role)
            base_url = f"http://127.0.0.1:{port}/v1"
            async with _cancelled_at_exit(check):
                model = str(path)
                async with InferenceClient(
                    [base_url], api_key=key, timeout=_START_SECONDS, model=model
                ) as client:
                    await client.wait_ready(_START_SECONDS)
                yield ServedModel(base_url=base_url, api_key=key, model=model)
        finally:
            processes.stop_all()


@asynccontextmanager
async def _cancelled_at_exit(check: Callable[[], None]) -> AsyncIterator[None]:
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(check))
            yield
            watch.cancel()
    except BaseExceptionGroup as group:
        await asyncio.sleep(_POLL_SECONDS)  # a killed server closes its connections before it ends
        check()  # if the server has ended, its end is the cause of the error in the block
        raise group.exceptions[0] from None


async def _watch(check: Callable[[], None]) -> None:
    while True:
        check()
        await asyncio.sleep(_POLL_SECONDS)
