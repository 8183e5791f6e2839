"""What a private folder costs a rollout, by the size of its files: made, copied into and removed.

python benchmarks/workdir.py [--rollouts 50]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from buckeye_mcp.config import GymConfig
from buckeye_mcp.tasks.task_schema import McpTask
from buckeye_mcp.workdir.folder import open_workdir

_CASES = (("no files", 0, 0), ("10 kB in 10 files", 10, 1_000), ("50 MB in 500 files", 500, 100_000))


def write(folder: Path, count: int, size: int) -> None:
    """Make so many files of so many bytes."""
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(os.urandom(size))


async def measured(files: str | None, rollouts: int) -> list[float]:
    """Seconds that each folder took, from nothing to nothing."""
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
    async with open_workdir(task, config):  # the files are read once for a process
        pass
    seconds = []
    for _ in range(rollouts):
        started = time.perf_counter()
        async with open_workdir(task, config):
            pass
        seconds.append(time.perf_counter() - started)
    return seconds


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


if __name__ == "__main__":
    main()
