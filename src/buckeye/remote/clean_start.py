"""Check that a run can start with the files, keys and packages that another machine gets.

`start_check` runs this module as `python -m buckeye.remote.clean_start` on this machine, in a folder that has
only the files for the other machine. The process cannot import packages that the other machine lacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import site
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from packaging.utils import canonicalize_name

from buckeye.base.distribution import CODE_FOLDER, DISTRIBUTION
from buckeye.base.keys import key, variables
from buckeye.base.request_gate import is_loopback
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.envs.base import Environment
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import BuckeyeError, EnvironmentNotFoundError, UsageError, first_line
from buckeye.launch.mcp_gateways import mcp_tasks
from buckeye.launch.plan import make_plan
from buckeye.launch.preflight.check import Check, failed, failed_with, skipped
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.preflight.model import find_model
from buckeye.launch.preflight.model_checks import MODEL, check_model, check_tokenizer
from buckeye.launch.preflight.ports import UnassignedPorts
from buckeye.launch.preflight.resource_checks import STORE, check_keys, check_store
from buckeye.launch.preflight.task_checks import check_tasks
from buckeye.launch.preflight.trainer_checks import trainer_warnings
from buckeye.launch.run_keys import rollout_environments
from buckeye.mcp.gateway.settings import API_KEY_VARIABLE
from buckeye.mcp.tasks.dataset import find_images
from buckeye.mcp.tasks.lock_file import find_lock
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.tasks.variables import resolve_variables
from buckeye.remote.software import PLATFORM_SPECIFIC, installed_versions
from buckeye.transport.object_store import STORE_PACKAGES
from buckeye.workers.loading import open_environment

_TASKS = "servers of the tasks"
_ON_EVERY_MACHINE = ("uv", "uvx")  # `bootstrap` installs them next to `python` on each machine
_INSTALLERS = ("pip", "setuptools")


class StartInputs(msgspec.Struct, kw_only=True, frozen=True):
    """Description of a start of `rl` on the other machine.

    `arguments` are the args of `rl`. `requirements` are the packages that the other machine installs, and
    `wheels` is a folder with unpacked wheels that it also gets. `gpus` is the number of its GPUs, or None if
    unknown. A `rented` machine has only the files that are sent. `only_here` lists folders of this machine
    that the other machine lacks.
    """

    arguments: list[str]
    requirements: list[str]
    gpus: int | None
    rented: bool
    wheels: str
    only_here: list[str]


def main() -> None:
    """Read a `StartInputs` from standard input, and write the results of all checks to a file.

    The only argument is the path of the file. Each line of the file is the JSON of a check. The last line is
    `null`, so that a reader detects a crash.
    """
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=StartInputs)
    hide_other_packages(start.requirements, start.wheels)
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for check in clean_start_checks(start):
            file.write(f"{json.dumps(asdict(check))}\n")
            file.flush()
        file.write("null\n")


def clean_start_checks(start: StartInputs) -> Iterator[Check]:
    """Check a start of `rl` in the working directory, and yield the results.

    Only checks that are possible on this machine run.
    """
    try:
        config = load_config(RLConfig, start.arguments)
    except BuckeyeError as error:
        yield failed_with("configuration", error)
        return
    path = find_model(config.trainer.model.name)
    with_vllm = bool(start.gpus) and config.inference is not None and config.inference.backend != "torch"
    model = check_model(config, vllm=with_vllm)
    yield from [model] if model.state != "skipped" else ()
    tokenizer = check_tokenizer(config)
    yield from [tokenizer] if path is not None else _on_hub(config.trainer.model.name)
    refused = trainer_warnings(config, path, on_gpu=bool(start.gpus))
    yield from (failed("settings", line, "") for line in refused)
    if start.gpus is not None:
        yield from _plan(config, start.gpus, path)
    yield from _rented_machine_checks(config, start.only_here) if start.rented else ()
    yield from _variables(config)
    is_known = tokenizer.state == "ok" and importlib.util.find_spec("tokenizers") is not None
    yield from check_tasks(config, path if is_known else None, opener=_open)


def _plan(config: RLConfig, gpus: int, path: Path | None) -> Iterator[Check]:
    machine = Machine(cores=os.cpu_count() or 1, gpus=tuple(range(gpus)))
    try:
        make_plan(config, machine, model_path=path, ports=UnassignedPorts())
    except UsageError as error:
        yield failed("GPUs", f"of the machine: {error}", "")


def _rented_machine_checks(config: RLConfig, only_here: Sequence[str]) -> Iterator[Check]:
    """Check that a rented machine has the keys, servers, object stores and programs that the run needs."""
    yield check_keys(config, is_local_run=False)
    near = [url for url in config.orchestrator.client.base_url if is_loopback(urlsplit(url).hostname or "")]
    if config.inference is None and near:
        yield failed(
            "inference servers",
            f"the run starts no inference server, and the other machine cannot reach {near[0]}",
            "add a section [inference]",
        )
    if config.trainer.ckpt is not None and config.trainer.ckpt.store is not None:
        yield _store(config, config.trainer.ckpt.store)
    yield from _programs(config, only_here)
    yield from _images(config)


def _images(config: RLConfig) -> Iterator[Check]:
    """Yield a failed check for each container image of the tasks that is not in a registry."""
    lock = find_lock(Path())
    for image in find_images(_tasks(config)):
        if "/" not in image:
            push = f"buckeye env push --image REGISTRY/ORG/{image}, and put that name into the tasks"
            yield failed(_TASKS, f"the image {image} has no registry in its name", push)
        elif lock is not None and lock.has_unpushed(image):
            yield failed(_TASKS, f"{image} was built here and not pushed since", "buckeye env push")


def _on_hub(name: str) -> Iterator[Check]:
    """Yield a failed check if the hub refuses the model, or a skipped one if it cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        hf_hub_download(name, "config.json", token=key("HF_TOKEN") or None)
    except RepositoryNotFoundError as error:  # the hub also raises it if the license is not accepted
        message = f"the Hugging Face hub refuses {name}: {first_line(error)}"
        yield failed(MODEL, message, "set HF_TOKEN, or correct the name")
    except Exception as error:  # the other machine may have another network
        message = "is not on this machine, and the Hugging Face hub cannot be reached"
        yield skipped(MODEL, f"{name} {message}: {first_line(error)}")


def _store(config: RLConfig, url: str) -> Check:
    module = STORE_PACKAGES.get(url.partition("://")[0])
    if module is not None and importlib.util.find_spec(module) is None:
        return skipped(STORE, f"cannot check {url}: {module} is not installed")
    check = check_store(config)
    if check.state != "failed":
        return check
    return failed(
        STORE, check.seen, "only variables with keys are sent (AWS_ACCESS_KEY_ID), not the files in ~/.aws"
    )


def _programs(config: RLConfig, only_here: Sequence[str]) -> Iterator[Check]:
    """Check that the other machine has the programs that tasks start, and the files in their arguments."""
    servers = [s for s in _servers(config) if isinstance(s, StdioServer)]
    words = dict.fromkeys(w for s in servers for w in (s.command, *s.args, s.cwd or ""))
    own = str(Path(sys.executable).parent) if sys.prefix != sys.base_prefix else os.devnull
    for word in words:
        path = Path(word)
        if path.is_absolute() and path.exists() and any(path.is_relative_to(folder) for folder in only_here):
            yield failed(
                _TASKS,
                f"{word} exists only on this machine",
                "add it to `files` of the task, and write its path with {workdir}",
            )
    names = {s.command for s in servers if "/" not in s.command}
    names = {name for name in names if not name.startswith("python") and name not in _ON_EVERY_MACHINE}
    elsewhere = os.pathsep.join(f for f in os.get_exec_path() if f != own)
    beside = sorted(n for n in names if Path(own, n).exists() and shutil.which(n, path=elsewhere) is None)
    for name in beside:
        yield failed(
            _TASKS, f"{name} is installed only in this Python environment", f"start it with `uvx {name}`"
        )
    if unknown := sorted(names - set(beside)):
        yield skipped(_TASKS, f"the image of the machine must have {', '.join(unknown)}")


def _variables(config: RLConfig) -> Iterator[Check]:
    """Yield a failed check if the servers of the tasks need environment variables that are not sent."""
    try:
        known = {API_KEY_VARIABLE: "made there", **variables()}
        resolve_variables([server.model_dump() for server in _servers(config)], known)
    except UsageError as error:
        yield failed_with(_TASKS, error)


def _servers(config: RLConfig) -> list[Any]:
    """Return the distinct MCP servers of all tasks."""
    found = [server for task in _tasks(config) for server in task.mcp_config.values()]
    return list({server.model_dump_json(): server for server in found}.values())


def _tasks(config: RLConfig) -> list[McpTask]:
    """Return the tasks of MCP environments. Another check reports tasks that cannot be read."""
    with suppress(UsageError):
        return mcp_tasks(rollout_environments(config))
    return []


def _open(env_id: str, args: Mapping[str, Any], settings: WorkerSettings) -> Environment | None:
    """Open an environment and return it, or None if it is not installed on this machine."""
    try:
        return open_environment(env_id, args, settings)
    except EnvironmentNotFoundError:
        return None


def hide_other_packages(requirements: Iterable[str], wheels: str) -> None:
    """Let this process import only modules that the other machine has.

    These are the standard library, modules in the working directory, Buckeye, the packages in the folder
    `wheels`, and `requirements` with their dependencies.
    """
    allowed = {
        *installed_versions(requirements),
        *PLATFORM_SPECIFIC,
        *_INSTALLERS,
        canonicalize_name(DISTRIBUTION),
    }
    hidden = {
        top
        for top, names in metadata.packages_distributions().items()
        if not any(_is_allowed(canonicalize_name(name), allowed) for name in names)
    }
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    base = {str(Path(folder)) for folder in (sys.base_prefix, sys.base_exec_prefix)}
    kept = [
        entry
        for entry in sys.path
        if entry in packages or any(Path(entry).is_relative_to(folder) for folder in base)
    ]
    sys.path[:] = [os.getcwd(), wheels, str(Path(CODE_FOLDER).parent), *kept]
    sys.meta_path[:] = [_Without(finder, hidden) for finder in sys.meta_path if not _is_editable(finder)]


def _is_allowed(name: str, allowed: Collection[str]) -> bool:
    return name in allowed or name.startswith("nvidia-")


def _is_editable(finder: object) -> bool:
    """Return True if the module finder belongs to an editable installation."""
    return "editable" in str(getattr(finder, "__module__", "") or "").lower()


class _Without:
    """Module finder that does not find the `hidden` modules.

    A hidden module is still found in the working directory or in a wheel, the first folders of `sys.path`.
    """

    def __init__(self, finder: Any, hidden: Collection[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that is not hidden."""
        spec = self._finder.find_spec(name, path, target)
        if spec is None or name.partition(".")[0] not in self._hidden:
            return spec
        where = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return spec if any(Path(w).is_relative_to(own) for w in where for own in sys.path[:2]) else None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return another method of the wrapped finder, such as a method for metadata."""
        return getattr(self._finder, name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
