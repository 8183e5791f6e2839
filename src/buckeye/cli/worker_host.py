"""`python -m buckeye.cli.worker_host`: a process of a run that starts environment workers on another node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from buckeye.base.process import die_with_parent


def serve_workers(argv: Sequence[str]) -> None:
    """Start workers for the run until this process ends."""
    from buckeye.launch.worker_hosts import serve

    parser = argparse.ArgumentParser(description="Start environment workers for a run on another node.")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int, help="port to listen on")
    options = parser.parse_args(argv)
    serve(options.host, options.port)


if __name__ == "__main__":
    die_with_parent()  # before slow imports, during which the launcher may be killed

    from buckeye.cli.errors import run_command

    run_command(lambda: serve_workers(sys.argv[1:]))
