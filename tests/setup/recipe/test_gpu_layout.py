"""Division of GPUs between sampling and training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import GPU_MEMORY_GB, GpuSpec
from buckeye.setup.recipe.training_machine import plan_gpus

SMALL, MIDDLE, LARGE = 600_000_000, 8_000_000_000, 32_000_000_000


@pytest.mark.parametrize(
    ("count", "parameters", "inference", "trainer"),
    [
        (1, SMALL, [0], [0]),
        (2, SMALL, [0], [1]),
        (4, SMALL, [0, 1, 2], [3]),
        (8, SMALL, [0, 1, 2, 3, 4, 5], [6, 7]),
        # 8 billion parameters train in 144 GB, 60 GB of each GPU: three of them
        (8, MIDDLE, [0, 1, 2, 3, 4], [5, 6, 7]),
    ],
)
def test_plan_gpus_divides_gpus(count, parameters, inference, trainer):
    layout = plan_gpus(GpuSpec(count, "H100_80GB", 80), parameters)
    assert (list(layout.inference), list(layout.trainer)) == (inference, trainer)
    assert (layout.tp, layout.lora, layout.is_shared) == (1, False, count == 1)


def test_plan_gpus_uses_adapters_for_large_models():
    # 32 billion: 64 GB of weights to sample from, above the 48 of a GPU, and 576 GB to train all of it
    layout = plan_gpus(GpuSpec(8, "A100_80GB", 80), LARGE)
    assert (layout.tp, layout.lora) == (2, True)
    assert (layout.inference, layout.trainer) == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert plan_gpus(GpuSpec(1, "H100_80GB", 80), MIDDLE).lora


def test_plan_gpus_refuses_a_model_that_does_not_fit(refusal):
    with refusal(UsageError):
        plan_gpus(GpuSpec(1, "H100_80GB", 80), LARGE)


@given(
    st.integers(1, 64),
    st.sampled_from(sorted(GPU_MEMORY_GB)),
    st.integers(1_000_000, 400_000_000_000),
)
def test_plan_gpus_gives_each_gpu_one_job_unless_it_is_single(count, kind, parameters):
    gpus = GpuSpec(count, kind, GPU_MEMORY_GB[kind])
    try:
        layout = plan_gpus(gpus, parameters)
    except UsageError:
        return
    assert {*layout.inference, *layout.trainer} == set(range(count))
    assert layout.is_shared == (count == 1)
    assert len(layout.inference) % layout.tp == 0
    if not layout.lora and count > 1:
        assert 18 * parameters <= 0.75 * gpus.memory_gb * 1e9 * len(layout.trainer)
    assert 2 * parameters <= 0.6 * gpus.memory_gb * 1e9 * layout.tp
