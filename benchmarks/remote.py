"""Measure the time to send a project to another machine: the first time, and after a small change.

    python benchmarks/remote.py [--delay 0.08] [--megabytes 50] [--files 2000]

A real ssh server on this machine, behind a proxy that adds `--delay` seconds to every round trip. Needs root
and openssh-server. Times start when the connection exists and end with the answer that everything has
arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.remote.proxy import proxied  # noqa: E402
from tests.remote.sshd import Host, sshd  # noqa: E402

from buckeye.remote.connection import SshConnection  # noqa: E402
from buckeye.remote.manifest import project_manifest  # noqa: E402
from buckeye.remote.upload import send_project  # noqa: E402


def main() -> None:
    """Print a line for each of three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.08, help="seconds a round trip")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--files", type=int, default=2000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="buckeye-remote-") as name:
        folder = Path(name)
        project = folder / "project"
        project.mkdir()
        for number in range(given.files):
            path = project / f"{number % 50}" / f"{number}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(given.megabytes * 1_000_000 // given.files))
        with sshd(folder / "host") as host, proxied(host.target.port, delay=given.delay / 2) as proxy:
            asyncio.run(_measure(host, proxy.port, project))


async def _measure(host: Host, port: int, project: Path) -> None:
    python = host.folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}/src exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    link = SshConnection(
        replace(host.target, port=port),
        known_hosts=host.folder / "known",
        identity_file=host.key,
        own_settings=False,
        tell=print,
    )
    await link.connect(timeout=30)
    for title in ("first", "nothing changed", "one file changed"):
        if title.startswith("one"):
            (project / "0" / "0.bin").write_bytes(b"new")
        started = time.perf_counter()
        sent = await send_project(link, str(python), f"{host.home}/project", project_manifest(project))
        print(f"{title}: {time.perf_counter() - started:.2f} s, {sent.files} files, {sent.bytes:,} bytes")
    await link.close()


if __name__ == "__main__":
    main()
