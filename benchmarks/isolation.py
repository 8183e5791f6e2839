"""Compare sequential and concurrent rollouts on published stateful servers: they must be equal.

    python benchmarks/isolation.py [--folder DIR] [--rollouts 200] [--at-once 20] [NAME ...]

`buckeye env play --policy random` runs the same random rollouts twice, on servers of published_servers.py.
The random calls depend on the messages read, so a rollout that sees another one takes a different course.
`shared` is a server with one file for all rollouts: it must differ, or nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from published_servers import BUCKEYE, SERVERS, init, install

STATEFUL = [
    "git",
    "sqlite",
    "filesystem",
    "memory",
    "memory-bank",
    "learning-memory",
    "task-manager",
    "thinking",
]
PLANTED = "shared"
_NOISE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b\d{10,}\b|\b[0-9a-f]{7,40}\b"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"
)


def main() -> None:
    """Print a row for each server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*STATEFUL, PLANTED, []], help="which; all by default")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=20)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="isolation-"))
    print("| server | rollouts | calls | that differ | one by one, side by side (s) |\n|---|---|---|---|---|")
    for name in given.names or [*STATEFUL, PLANTED]:
        print(row(name, folder.absolute() / name, given.rollouts, given.at_once), flush=True)


def row(name: str, folder: Path, rollouts: int, at_once: int) -> str:
    """Run the rollouts sequentially and concurrently, and compare them."""
    server = SERVERS["memory" if name == PLANTED else name]
    folder.mkdir(parents=True, exist_ok=True)
    programs, _ = install(server, folder)
    init(server, programs, folder)
    if name == PLANTED:
        tasks = folder / "tasks.json"
        tasks.write_text(tasks.read_text().replace("{workdir}/memory.jsonl", f"{folder}/all.jsonl"))
    alone, slow = played(folder, rollouts, 1)
    beside, fast = played(folder, rollouts, at_once)
    calls = sum(chat.count('"role": "assistant"') for chat in alone.elements())
    differ = sum((alone - beside).values())
    return f"| {name} | {rollouts} | {calls} | {differ} | {slow:.0f}, {fast:.0f} |"


def played(folder: Path, rollouts: int, at_once: int) -> tuple[Counter[str], float]:
    """Return the content of each rollout, without the server's clocks and random numbers, and the seconds."""
    words = ["env", "play", "configs/env.yaml", "--dataset", "tasks.json", "--policy", "random", "--json"]
    argv = [*BUCKEYE, *words, "-n", str(rollouts), "--at-once", str(at_once)]
    started = time.monotonic()
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
    )
    (folder / f"{at_once}.jsonl").write_text(done.stdout)
    return Counter(map(told, done.stdout.splitlines())), time.monotonic() - started


def told(line: str) -> str:
    """Return a rollout's record in a form that must repeat."""
    record = json.loads(line)
    parts: Sequence[object] = [record[key] for key in ("task_id", "reward", "error", "messages")]
    return _NOISE.sub("#", json.dumps(parts))


if __name__ == "__main__":
    main()
