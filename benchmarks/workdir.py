"""Measure the cost of a rollout's private folder by the size of its files, and of the isolation check.

The cost includes creation, copying and removal.

    python benchmarks/workdir.py [--rollouts 50]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from buckeye.mcp.config import GymConfig
from buckeye.mcp.isolation.probe import probe_isolation
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.workdir.folder import open_workdir

_NOTES = Path(__file__).parents[1] / "tests/mcp/workdir/notes_server.py"
_CASES = (("no files", 0, 0), ("10 kB in 10 files", 10, 1_000), ("50 MB in 500 files", 500, 100_000))


def write(folder: Path, count: int, size: int) -> None:
    """Make `count` files of `size` bytes."""
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(os.urandom(size))


async def measured(files: str | None, rollouts: int) -> list[float]:
    """Return the seconds that each folder took, from creation to removal."""
    config = GymConfig.model_validate(
        {"parser": {"format": "tools"}, "action_mappings": {"go": {"_tool": "go"}}, "files": files}
    )
    task = McpTask.model_validate(
        {
            "id": "one",
            "prompt": "Go.",
            "mcp_config": {"a": {"command": "true"}},
            "evaluate_tool": {"name": "evaluate"},
        }
    )
    async with open_workdir(task, config):  # the files are read once per process
        pass
    seconds = []
    for _ in range(rollouts):
        started = time.perf_counter()
        async with open_workdir(task, config):
            pass
        seconds.append(time.perf_counter() - started)
    return seconds


def notes_task() -> McpTask:
    """Return a task on the tests' small server, which keeps its notes in its folder."""
    server = {"command": sys.executable, "args": [str(_NOTES)]}
    given = {"id": "one", "prompt": "Note.", "mcp_config": {"notes": server}}
    return McpTask.model_validate({**given, "evaluate_tool": {"name": "evaluate"}})


def notes_config() -> GymConfig:
    """Return a configuration with two of its tools: one writes, one reads."""
    add = {"_tool": "add", "_parser": {"positional": ["text"]}, "text": {"from_arg": "text"}}
    return GymConfig.model_validate(
        {"system_prompt": "Call tools.", "action_mappings": {"add": add, "notes": {"_tool": "notes"}}}
    )


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=50)
    rollouts = parser.parse_args().rollouts
    for name, count, size in _CASES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), count, size)
            began = time.process_time()
            seconds = asyncio.run(measured(folder if count else None, rollouts))
            cpu = (time.process_time() - began) / (rollouts + 1)
        median, most = statistics.median(seconds) * 1000, max(seconds) * 1000
        print(f"{name}: median {median:.2f} ms, most {most:.2f} ms, {cpu * 1000:.2f} ms of a core")
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = asyncio.run(probe_isolation([notes_task()], notes_config(), 120.0))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    print(f"isolation: {found}; servers took {cpu:.2f} s of a core")


if __name__ == "__main__":
    main()
