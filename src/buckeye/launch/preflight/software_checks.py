"""Check that this version of Buckeye can use the installed Python, libraries, build of torch, and vLLM."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from buckeye.base.columns import counted
from buckeye.base.distribution import cpu_torch_command, install_command, requirements
from buckeye.config.rl import RLConfig
from buckeye.dataset.requirements import is_dataset_environment, needed_extras
from buckeye.errors import UsageError
from buckeye.inference.vllm.interpreter import (
    PYTHON_VARIABLE,
    default_vllm_venv,
    find_vllm,
    require_vllm,
)
from buckeye.launch.mcp_gateways import mcp_extras
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, skipped
from buckeye.launch.run_keys import rollout_environments
from buckeye.monitor.tracker_threads import tracker_class
from buckeye.transport.object_store import STORE_PACKAGES

PYTHON, VLLM = "Python", "vLLM"
LIBRARIES = "libraries"


def extras_of(config: RLConfig | None) -> list[str]:
    """Return the extras of pip whose libraries a run with this configuration imports."""
    if config is None:
        return ["model"]
    extras = {"model", *(tracker_class(tracker).folder for tracker in config.trackers(config.trainer.wandb))}
    if config.trainer.optim.type == "adamw8bit":
        extras.add("optim8bit")
    if config.cluster.nodes > 1 and config.cluster.engine == "ray":
        extras.add("ray")
    store = config.trainer.ckpt.store if config.trainer.ckpt is not None else None
    if store is not None and (kind := store.partition("://")[0]) in STORE_PACKAGES:
        extras.add(kind)
    for env in rollout_environments(config):
        if is_dataset_environment(env.id):
            extras |= needed_extras(env.args)
    with suppress(UsageError):  # the check of the environments reports unreadable files
        extras |= mcp_extras(rollout_environments(config))
    return sorted(extras)


def check_libraries(extras: Iterable[str]) -> Check:
    """Check that the installed libraries satisfy the requirements of these extras of pip."""
    problems, installed = [], []
    for requirement in map(Requirement, requirements(extras)):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        installed.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(Version(version), prereleases=True):
            problems.append(f"{requirement.name} {version} does not satisfy {requirement.specifier}")
    if problems:
        return failed(
            LIBRARIES,
            "; ".join(problems),
            install_command(*extras),
            sorted(installed),
            code="BK-PACKAGE-VERSION",
        )
    main = [entry for entry in installed if entry.split()[0] in ("torch", "transformers", "peft")]
    return ok(LIBRARIES, f"{', '.join(main)} and {len(installed) - len(main)} more", sorted(installed))


def check_torch_build(gpus: int) -> Check:
    """Check that torch can use the GPUs. On a machine without GPUs, suggest the smaller build for CPUs."""
    name = "torch's build"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        do = "" if gpus else f"for the smaller build without CUDA, first run: {cpu_torch_command()}"
        return skipped(name, "torch is not installed", do)
    if not gpus and any(line.startswith("nvidia-") for line in metadata.requires("torch") or ()):
        smaller = cpu_torch_command("--force-reinstall", "--no-deps")
        return ok(
            name,
            f"{version} for CUDA, no GPU; the build without CUDA is smaller: use a new environment, or run: "
            f"{smaller}",
        )
    if gpus and version.endswith("+cpu"):
        return failed(
            name,
            f"torch {version} cannot use the {counted(gpus, 'GPU')} of this machine",
            "install torch for CUDA (command: pytorch.org), or set the devices to cpu",
        )
    return ok(name, f"{version}, {counted(gpus, 'GPU')}" if gpus else f"{version}, no GPU")


def check_python() -> Check:
    """Report the Python version and executable."""
    return ok(PYTHON, f"{platform.python_version()}, {sys.executable}")


def check_vllm(config: RLConfig | None, *, gpus: int) -> Check:
    """Check that vLLM is installed if the configuration needs it. Starts one or two interpreters to check."""
    inference = config.inference if config is not None else None
    python = inference.vllm_python if inference is not None else None
    is_required = inference is not None and inference.backend == "vllm"
    if config is not None and not gpus and not is_required:
        return skipped(VLLM, "not used: the embedded engine runs on the CPU")
    try:
        vllm = require_vllm(python) if is_required else find_vllm(python)
    except UsageError as error:
        return failed_with(VLLM, error)
    if vllm is None:
        do = "to use vLLM: `buckeye vllm install`"
        return skipped(VLLM, "not installed: the run uses the embedded engine", do)
    return ok(VLLM, f"{vllm.distribution} {vllm.version}, {vllm.python}")


def uses_vllm(config: RLConfig, *, on_gpu: bool) -> bool:
    """Return True if the run will probably use vLLM. Only a start of its interpreter would prove it."""
    if config.inference is None or config.inference.backend == "torch":
        return False
    installed = (
        config.inference.vllm_python is not None
        or PYTHON_VARIABLE in os.environ
        or importlib.util.find_spec("vllm") is not None
        or default_vllm_venv().is_dir()
    )
    return config.inference.backend == "vllm" or (on_gpu and installed)
