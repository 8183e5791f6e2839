"""Environment variables that let the processes of a run share one machine."""

from contextlib import closing

import pytest

from buckeye.base.process import PYTHON
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.launch.plan import make_plan
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.preflight.ports import Ports

WORDS = ("--trainer", "--orchestrator.env.0.id", "x", "--inference", "{}")


def make(*words, gpus=()):
    config = load_config(RLConfig, [*WORDS, *words])
    with closing(Ports()) as ports:
        return make_plan(config, Machine(cores=8, gpus=gpus), model_path=None, ports=ports)


def environments(*words, gpus=()):
    plan = make(*words, gpus=gpus)
    return [role.env for kind in ("inference", "trainer") for role in plan.of_kind(kind)]


def test_processes_import_from_the_working_directory_only_if_the_launcher_does():
    assert {role.argv[: len(PYTHON)] for role in make().roles} == {PYTHON}


@pytest.mark.parametrize(("level", "threads", "spins"), [(0, "8", "5000"), (1, "4", "1000")])
def test_synchronous_run_gives_all_cores_to_each_process(monkeypatch, level, threads, spins):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    told = environments("--max-async-level", str(level))
    assert [(env["OMP_NUM_THREADS"], env["GOMP_SPINCOUNT"]) for env in told] == [(threads, spins)] * 2


def test_plan_keeps_thread_and_memory_variables_of_the_user(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert [env["GOMP_SPINCOUNT"] for env in environments("--max-async-level", "0")] == ["7", "7"]
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    inference, trainer = environments()
    assert "GLIBC_TUNABLES" not in inference
    assert "trim_threshold" in trainer["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert environments()[1]["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


def test_gpu_trainer_uses_expandable_segments(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    inference, trainer = environments(gpus=(0, 1))
    assert "PYTORCH_ALLOC_CONF" not in inference
    assert trainer["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in environments()[1]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")  # the user's setting takes precedence
    assert "PYTORCH_ALLOC_CONF" not in environments(gpus=(0, 1))[1]


def test_rank_variables_are_set_only_for_several_ranks():
    def told(*words):
        named = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return [{name: env.get(name) for name in named} for env in environments(*words)[1:]]

    assert told() == [dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))]
    assert [list(env.values()) for env in told("--trainer-gpu-ids", "1,2")] == [
        [str(rank), "0", "2", "2"] for rank in range(2)
    ]
