"""What several workers of a test run need is made by the first that needs it."""

import fcntl
import os


def made_once(tmp_path_factory, name, make):
    """The folder `name` that `make(folder)` has filled, the same for all workers; they leave it as it is."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
