"""`python -m buckeye.cli.rollout_worker FD INDEX`: a process of the orchestrator that runs rollouts.

`rl status` lists these processes by INDEX.
"""

from __future__ import annotations

import sys

from buckeye.base.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before slow imports, during which the orchestrator may be killed

    from buckeye.cli.errors import run_command

    def work() -> None:
        """Run rollouts until the connection to the orchestrator ends."""
        from buckeye.orchestrator.rollout_worker import run_rollout_worker

        run_rollout_worker(int(sys.argv[1]))

    run_command(work)
