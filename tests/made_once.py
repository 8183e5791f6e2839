"""Share files between the workers of a test run: the first that needs them makes them."""

import fcntl
import os


def made_once(tmp_path_factory, name, make):
    """Return the folder `name` filled by `make(folder)`; all workers share it, and none changes it."""
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
