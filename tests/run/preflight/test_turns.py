"""Decisions of a run on one device: whether engine and trainer take turns, and what moves to main memory."""

import pytest

from buckeye.base.turns import TURNS_VARIABLE, turns
from buckeye.errors import UsageError
from buckeye.launch.plan import make_plan
from buckeye.launch.preflight.device_checks import check_colocation
from buckeye.launch.preflight.devices import Gpu, Machine, MainMemory
from buckeye.launch.preflight.memory_check import check_memory
from buckeye.launch.preflight.memory_plan import Hardware
from buckeye.launch.preflight.model_shape import parse_shape
from buckeye.launch.preflight.ports import UnassignedPorts
from buckeye.launch.preflight.turns import (
    check_turns,
    choose_colocation,
    plan_turns,
    settle_cache,
    settle_turns,
)

from .test_memory import GB, SMALL, config

SHAPE = parse_shape(SMALL)
LONG = ("--seq-len", "8192")


def hardware(total, *, vllm=False):
    gpu = Gpu(index=0, name="A", total=total, free=total)
    return Hardware(memory=MainMemory(total=64 * GB, free=64 * GB), gpus=(gpu,), vllm=vllm)


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        ("", [0], True),
        ("", [], False),
        ("", [0, 1], False),
        ("--inference-gpu-ids 0 --trainer-gpu-ids 0", [0], True),
        ("--trainer-gpu-ids 0", [0], True),
        ("--inference-gpu-ids 1 --trainer-gpu-ids 1", [0], False),
        ("--inference-gpu-ids 0,1 --trainer-gpu-ids 0", [0], False),
        ("--max-async-level 1", [0], False),
        ("--max-async-level 0", [0], True),
        ("--trainer.model.device cpu", [0], False),
        ("--orchestrator.env.0.max-concurrent 4", [0], False),
        ("--colocate false", [0], False),
        ("--colocate true", [], True),
        ("--colocate", [0, 1], True),
    ],
)
def test_one_gpu_is_used_in_turns(words, gpus, expected):
    chosen = choose_colocation(config(*words.split()), gpus)
    assert chosen.colocate is expected
    if expected:
        assert chosen.inference_gpu_ids == chosen.trainer_gpu_ids == [0]
        assert chosen.trainer.max_async_level == chosen.orchestrator.max_async_level == 0
        assert choose_colocation(chosen, gpus) == chosen


@pytest.mark.parametrize(
    "words",
    [
        "--max-async-level 1",
        "--inference-gpu-ids 0,1",
        "--trainer-gpu-ids 1",
        "--trainer-gpu-ids 0,1",
        "--orchestrator.client.base-url http://h:1/v1 --no-inference",
        "--cluster.nodes 2",
    ],
)
def test_colocate_is_refused_where_it_cannot_work(words, refusal):
    with refusal(UsageError):
        config("--colocate", "true", *words.split())


def test_processes_get_the_turns(monkeypatch):
    plain, shared = (
        make_plan(
            config("--colocate", value, "--colocate-offload", "weights"),
            Machine(cores=2, gpus=()),
            model_path=None,
            ports=UnassignedPorts(),
        )
        for value in ("false", "true")
    )
    assert [role.env.get(TURNS_VARIABLE) for role in plain.roles] == [None] * 3
    assert [role.env.get(TURNS_VARIABLE) for role in shared.roles] == ["weights"] * 3
    assert turns() is None
    for setting in ("none", "weights", "optimizer", "both"):
        monkeypatch.setenv(TURNS_VARIABLE, setting)
        found = turns()
        assert found.setting == setting
        assert (found.weights, found.optimizer) == (
            "w" in setting or setting == "both",
            setting in ("optimizer", "both"),
        )


@pytest.mark.parametrize(
    ("words", "total", "offload"),
    [
        ((), 80 * GB, "none"),
        (LONG, 80 * GB, "none"),
        (("--colocate-offload", "both"), 80 * GB, "both"),
        ((), 19 * GB, "weights"),  # the trainer needs 17 GB, and the engine's weights 1.5 GB
        (("--orchestrator.batch-size", "128"), 24 * GB, "optimizer"),  # for a cache of 64 rollouts: 15 GB
        (LONG, 14 * GB, "both"),
    ],
)
def test_nothing_leaves_the_gpu_while_memory_allows(words, total, offload):
    run = config("--colocate", "true", *words)
    plan = plan_turns(run, SHAPE, hardware(total))
    assert plan.turns.setting == offload
    assert plan.size("sampling") <= total


def test_kv_cache_is_what_the_trainer_leaves_in_the_turn_of_the_engine():
    run = config("--colocate", "true", "--seq-len", "16384")
    settled = settle_turns(run, SHAPE, hardware(40 * GB, vllm=True))
    plan = plan_turns(run, SHAPE, hardware(40 * GB))
    cache = int(1e9 * settled.inference.kv_cache_gb)
    # 4 and 8 bytes a parameter for the trainer's weights and moments, 2 for the engine's weights
    weights = 14 * SHAPE.parameters + 2 * SHAPE.embeddings
    assert cache == pytest.approx(plan.kv_cache, abs=1)
    assert 20 * GB < cache < 0.95 * 40 * GB - weights
    assert settled.colocate_offload == plan.turns.setting
    # vLLM checks that this share of the memory is free when it starts
    assert settled.inference.gpu_memory_utilization == pytest.approx(
        plan.needs[0].total / (40 * GB), abs=0.01
    )
    fixed = settle_turns(config("--colocate", "--inference.kv-cache-gb", "3"), SHAPE, hardware(40 * GB))
    assert fixed.inference.kv_cache_gb == 3


def test_doctor_reports_the_memory_of_both_turns(wording):
    run = config("--colocate", "true")
    (turn,) = check_turns(run, SHAPE, hardware(24 * GB))
    memory = check_memory(run, SHAPE, hardware(24 * GB))
    assert turn.seen == wording
    assert [turn.state, memory.state] == ["ok", "ok"]
    assert memory.lines == wording
    assert check_memory(run, SHAPE, hardware(6 * GB)).state == "failed"
    assert [c.state for c in check_turns(run, None, hardware(24 * GB))] == ["skipped"]
    assert check_colocation(config(), []) == []
    (on_cpu,) = check_colocation(run, [])
    assert on_cpu.state == "ok"


def test_kv_cache_of_vllm_next_to_a_trainer_is_explicit():
    """vLLM and the trainer start together, so a measurement of free memory depends on chance."""
    run = config("--colocate", "false", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "0")
    assert run.inference.gpu_memory_utilization == 0.4
    cache = settle_cache(run, SHAPE, hardware(80 * GB, vllm=True)).inference.kv_cache_gb
    assert cache * 1e9 == pytest.approx(0.4 * 80 * GB - 2 * SHAPE.parameters - 2 * 2**30)
    small = settle_cache(run, SHAPE, hardware(2 * GB, vllm=True)).inference.kv_cache_gb
    assert 0 < small < 6
    for other in (hardware(80 * GB), hardware(80 * GB, vllm=True)):
        apart = config("--inference-gpu-ids", "0", "--trainer-gpu-ids", "1")
        assert settle_cache(apart if other.vllm else run, SHAPE, other).inference.kv_cache_gb is None
