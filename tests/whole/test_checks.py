"""Single checks: devices, libraries, paths, the model's files, the sample of an environment."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from unittest import mock

import pytest
from tests.orchestrator.made_rollouts import rollout

from buckeye.base.distribution import install_command
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.evaluation.doctor_checks import comparable_groups, spread_check
from buckeye.launch.preflight import software_checks
from buckeye.launch.preflight.devices import gpus, main_memory, read_gpus
from buckeye.launch.preflight.model_checks import check_template
from buckeye.launch.preflight.model_files import missing_files
from buckeye.launch.preflight.resource_checks import (
    check_directory,
    check_ports,
    check_shared_memory,
)
from buckeye.launch.preflight.software_checks import check_libraries, check_torch_build
from buckeye.orchestrator.evaluation import EvalResult

MIB = 2**20


def test_gpus_and_who_is_on_them(tmp_path, monkeypatch):
    listing = "0, GPU-a, NVIDIA H200, 143771, 143000\n1, GPU-b, NVIDIA H200, 143771, 71\n"
    apps = "GPU-b, 4321, python, 143700\nGPU-b, 77, [Not Found], [N/A]\n"
    first, second = read_gpus(listing, apps)
    assert (first.index, first.name, first.total, first.users) == (0, "NVIDIA H200", 143771 * MIB, ())
    assert second.free == 71 * MIB
    assert second.users == (("4321", "python", 143700 * MIB), ("77", "[Not Found]", 0))
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase \"$1\" in *compute*) printf '{apps}';; *) printf '{listing}';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus() == [first, second]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []


def test_a_gpu_without_its_own_memory_has_main_memory():
    (gpu,) = read_gpus("0, GPU-a, NVIDIA GB10, [N/A], [N/A]\n", "GPU-a, [N/A], [N/A], [N/A]\n")
    assert gpu.total == main_memory().total
    assert 0 < gpu.free <= gpu.total
    assert gpu.users == (("[N/A]", "[N/A]", 0),)


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_containers_memory_counts_and_not_the_machines(tmp_path, limit, used):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / used).write_text("400000\n")
    memory = main_memory(tmp_path)
    assert (memory.total, memory.free) == (1_000_000, 600_000)
    (tmp_path / limit).write_text("max\n")
    assert main_memory(tmp_path).total == main_memory(tmp_path / "none").total > 10**8


def test_libraries_are_compared_with_what_the_distribution_asks_for(monkeypatch):
    asked = {"train": ["numpy>=2.0", "torch>=2.8,!=2.9.1"], "wandb": ["wandb>=0.21"]}
    monkeypatch.setattr(software_checks, "requirements", lambda extras: [r for e in extras for r in asked[e]])
    versions = {"numpy": "2.1", "torch": "2.10.0+cpu"}

    def version_of(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version_of)
    assert check_libraries(["train"]).state == "ok"
    missing = check_libraries(["train", "wandb"])
    assert missing.state == "failed"
    assert missing.do == install_command("train", "wandb")
    versions["torch"] = "2.9.1"
    known_bad = check_libraries(["train"])
    assert known_bad.state == "failed"
    assert "torch 2.9.1" in known_bad.seen


@pytest.mark.parametrize(
    ("gpus", "version", "state"),
    [(2, "2.9.0+cpu", "failed"), (2, "2.9.0+cu130", "ok"), (0, "2.9.0+cpu", "ok"), (0, None, "skipped")],
)
def test_the_build_of_torch(gpus, version, state, monkeypatch):
    def version_of(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    assert check_torch_build(gpus).state == state


def test_without_a_gpu_the_smaller_torch_is_told(monkeypatch):
    cuda = ["filelock", "nvidia-cudnn-cu13==9.2; platform_system == 'Linux'"]
    monkeypatch.setattr(metadata, "requires", lambda _: cuda)
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0")
    seen = [check_torch_build(gpus).seen for gpus in (0, 1)]
    assert ["whl/cpu" in text for text in seen] == [True, False]


def test_a_directory(tmp_path):
    assert check_directory(tmp_path / "not" / "yet").state == "ok"
    assert not (tmp_path / "not").exists()
    assert list(tmp_path.iterdir()) == []
    if os.path.isdir("/proc/self"):
        assert check_directory(type(tmp_path)("/proc/self/fd")).state == "failed"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "BK-DISK-FULL"),
        (errno.EDQUOT, "BK-DISK-FULL"),
        (errno.EACCES, "BK-FILE-PERMISSION"),
        (errno.EROFS, "BK-FILE-PERMISSION"),
    ],
)
def test_code_of_directory_that_cannot_be_written(tmp_path, monkeypatch, number, code):
    failure = OSError(number, os.strerror(number))
    monkeypatch.setattr("tempfile.NamedTemporaryFile", mock.Mock(side_effect=failure))
    check = check_directory(tmp_path)
    assert (check.state, check.code) == ("failed", code)


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--trainer", "--orchestrator", "--inference"]
        chosen = load_config(RLConfig, [*words, "--inference.server.port", str(port)])
        check = check_ports(chosen)
        assert (check.state, str(port) in check.seen) == ("failed", True)
    assert check_ports(chosen).state == "ok"
    assert check_ports(load_config(RLConfig, words)).state == "ok"


def test_every_process_raises_its_limit_of_open_files():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource, sys; from buckeye.cli.errors import run_command; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); "
        "run_command(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) == (hard if hard != resource.RLIM_INFINITY else 65_536)


@pytest.mark.parametrize(("given", "bars"), [({}, True), ({"HF_HUB_DISABLE_PROGRESS_BARS": "0"}, False)])
def test_no_process_draws_progress_bars_into_a_pipe_unless_it_is_told_to(given, bars):
    code = (
        "import os; from buckeye.cli.errors import run_command\n"
        "def show():\n"
        "    from huggingface_hub.utils import are_progress_bars_disabled\n"
        "    print(are_progress_bars_disabled(), os.environ['HF_DATASETS_DISABLE_PROGRESS_BARS'])\n"
        "run_command(show)"
    )
    names = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert shown.stdout.split() == [str(bars), "1"]


def test_shared_memory(tmp_path):
    assert check_shared_memory(needed=True, path=tmp_path / "none").state == "skipped"
    assert check_shared_memory(needed=False, path=tmp_path).state == "ok"


def test_files_and_chat_template_of_a_model(tmp_path):
    assert missing_files(tmp_path) == ["model.safetensors"]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_text("")
    assert missing_files(tmp_path) == ["model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert missing_files(tmp_path) == ["a readable model.safetensors.index.json"]
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ b }}"},
    ]
    for config, state in (
        (None, "failed"),
        ({"eos_token": "x"}, "failed"),
        ([], "failed"),
        ({"chat_template": "{{ a }}"}, "failed"),
        ({"chat_template": "{{ messages[0].content }}"}, "ok"),
        ({"chat_template": named, "bos_token": {"content": "<s>"}}, "ok"),
    ):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert check_template(tmp_path).state == state


def _played(groups, *, truncated=False) -> EvalResult:
    played = [rollout(reward, truncated=truncated or reward == 0.25) for group in groups for reward in group]
    return EvalResult(env_name="toy", all_rollouts=played, rollouts_per_example=len(groups[0]), seconds=1.0)


def test_groups_with_two_rewards_are_comparable():
    groups = comparable_groups(_played([(0, 1, 1), (1, 1, 1), (0, None, 0.25), (None, None, 1)]))
    assert groups == [[0, 1, 1], [1, 1, 1], [0, 0.25]]


@pytest.mark.parametrize(
    ("groups", "truncated", "state"),
    [
        ([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], False, "ok"),
        ([[0.0, 0.0]] * 4, False, "warning"),
        ([[1.0, 1.0]] * 4, False, "warning"),
        ([[0.0, 1.0]] * 4, True, "warning"),
        ([[0.5, 0.5]] * 4, True, "warning"),
        ([[0.0, 0.0]] * 4, True, "warning"),
        ([[0.0, 1.0], *[[None, None]] * 9], False, "failed"),
        ([[None, None]], False, "failed"),
    ],
    ids=["good", "hard", "easy", "cut", "constant", "cut and hard", "mostly errors", "errors"],
)
def test_what_a_sample_says(groups, truncated, state, wording):
    check = spread_check(_played(groups, truncated=truncated))
    assert check.state == state
    assert f"{check.name}: {check.seen} -> {check.do}" == wording
