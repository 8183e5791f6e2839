"""The forecast of a trainer compared with numbers computed by hand, and with measured trainings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buckeye.base.gpu_speeds import GpuSpeed, gpu_speed
from buckeye.launch.preflight.forecast import (
    Costs,
    TrainerLoad,
    peak_bytes,
    publish_seconds,
    step_seconds,
    step_work,
)
from buckeye.launch.preflight.memory_plan import trainer_load
from buckeye.launch.preflight.model_shape import parse_shape
from buckeye.launch.preflight.trainer_forecast import (
    TrainerForecast,
    check_forecast,
    compare,
    forecast_trainer,
    refine,
)
from buckeye.launch.progress import describe_time_left
from tests.run.preflight.test_memory import GB, TOY, TOY_PARAMETERS, config, on_cpu, on_gpus

SHAPE = parse_shape(TOY)
SLOW = GpuSpeed(flops=1e9, bandwidth=1e6, ampere_share=0.5)
LOAD = TrainerLoad(shape=SHAPE, tokens=512, row=128, length=64, moments=8 * TOY_PARAMETERS)
# each layer: norms 4 x 64, queries 3 x 64, keys 3 x 32, feed-forward 4 x 128
LAYER = 4 * 64 + 3 * 64 + 3 * 32 + 4 * 128
# 3 of 4 layers: 8 experts of 32 units instead of 128 units; a token passes 2 of them and a shared one
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def test_gpu_speed_by_name():
    hopper = gpu_speed("NVIDIA H100 80GB HBM3")
    assert hopper == gpu_speed("H100_80GB") != gpu_speed("NVIDIA H100 PCIe")
    assert gpu_speed("RTX4090_24GB") == gpu_speed("NVIDIA GeForce RTX 4090")
    assert gpu_speed("Tesla K80") is None


def test_peak_of_full_training_on_a_gpu():
    chunk = 10 * 128 * 1000 - 2 * 128 * (3 * 128 + 2 * 64)  # the backward pass of a layer reuses logits
    activations = 2 * 128 * (4 * LAYER + 3 * 64 + 3 * 128 + 2 * 64)
    assert peak_bytes(LOAD) == (16 + 2) * TOY_PARAMETERS + activations + chunk + 4 * 64_000


def test_peak_of_single_micro_batch_has_gradients_in_the_place_of_activations():
    single = replace(LOAD, tokens=128)
    saved = min(4 * TOY_PARAMETERS, 2 * 128 * (4 * LAYER + 3 * 64 + 3 * 128 + 2 * 64))
    assert peak_bytes(LOAD) - peak_bytes(single) == saved


def test_peak_of_adapter_with_recomputation_and_shards():
    load = replace(LOAD, adapter=1000, moments=8000, shards=2, recomputed=4, frozen=2 * TOY_PARAMETERS)
    layer = LAYER + 3 * 64
    temporary = 3 * 128 + 2 * 64 + layer
    chunk = max(0, 10 * 128 * 1000 - 2 * 128 * temporary)
    gathered = 2 * (2 * 37_008 + 64_000)
    state = 16 * 1000 // 2 + 2 * TOY_PARAMETERS // 2
    assert peak_bytes(load) == state + gathered + 2 * 128 * (4 * 64 + 3 * 64 + temporary) + chunk
    offloaded = replace(load, offloaded=True)
    assert peak_bytes(load) - peak_bytes(offloaded) == 2 * 128 * 4 * 64


def test_shape_of_experts():
    shape = parse_shape(TOY | EXPERTS)
    router, expert = 64 * 8, 3 * 64 * 32
    sparse = 36_992 - 3 * 64 * 128 + router + 9 * expert
    assert shape.parameters == 64_000 + 36_992 + 3 * sparse + 64
    assert shape.active_expert_elements == 3 * 2 * expert
    assert shape.matrix_elements == shape.parameters - 3 * 8 * expert
    assert shape.units == 3 * 32


def test_work_of_a_step():
    work = step_work(LOAD, SLOW)
    assert work["matmul"] == pytest.approx(6 * TOY_PARAMETERS * 512 / 1e9)
    assert work["attention"] == pytest.approx(3.5 * 2 * 4 * 64 * 64 * 512 / 1e9 / 0.5)
    assert work["activations"] == pytest.approx(2 * 512 * 3 * 4 * LAYER / 1e6)
    assert work["optimizer"] == pytest.approx((12 + 16) * TOY_PARAMETERS / 1e6)
    assert work["grouped"] == work["routing"] == work["adapter"] == 0
    recomputed = step_work(replace(LOAD, recomputed=4, adapter=1000, adapted=7, ranks=2), SLOW)
    assert recomputed["matmul"] == pytest.approx(6 * TOY_PARAMETERS * 256 / 1e9)  # 2 forward, 1 backward
    assert recomputed["adapter"] == 4 * 7 * 256


def test_seconds_are_those_of_the_device_or_of_the_launches():
    costs = Costs(matmul=1, attention=0, activations=0, optimizer=0, published=0.5, launches=0.001)
    device = 6 * TOY_PARAMETERS * 512 / 1e9
    assert step_seconds(LOAD, SLOW, costs) == pytest.approx(device)
    slow_host = replace(costs, launches=1.0, adapter_launches=2.0)
    assert step_seconds(LOAD, SLOW, slow_host) == pytest.approx(4 * 4 * 3)  # layers, micro-batches, passes
    lora = replace(LOAD, adapter=1000, recomputed=4)
    assert step_seconds(lora, SLOW, slow_host) == pytest.approx(4 * 4 * 5 * 2)
    assert publish_seconds(replace(LOAD, published=10), costs) == 5.03


def test_forecast_of_a_run_names_ranges_and_upper_bound():
    given = config("--trainer.seq-len", "256", "--orchestrator.seq-len", "128")
    forecast = forecast_trainer(given, SHAPE, on_cpu(), threads=1)
    assert forecast.load.tokens == 8 * 128
    check = check_forecast(forecast)
    assert check.state == "ok"
    assert check.seen.startswith("trainer, at most 1,024 tokens a step: ")
    low, high = forecast.seconds / 1.3, forecast.seconds * 1.3
    assert f"({low:.3g} to {high:.3g}) a step" in check.seen
    assert (
        check_forecast(forecast_trainer(given, SHAPE, on_gpus(24 * GB, 24 * GB), threads=1)).state
        == "skipped"
    )


def test_emulated_bfloat16_is_slower_than_float32():
    given = config("--trainer.model.compute-dtype", "bfloat16")
    emulated, fast = (
        forecast_trainer(given, SHAPE, on_cpu(fast_bfloat16=has), threads=1) for has in (False, True)
    )
    exact = forecast_trainer(config("--trainer.model.compute-dtype", "float32"), SHAPE, on_cpu(), threads=1)
    assert emulated.speed.flops == pytest.approx(0.13 * exact.speed.flops)
    assert fast.speed.flops == pytest.approx(2.5 * exact.speed.flops)


def test_work_of_several_updates():
    """Two epochs in three mini-batches each: twice the tokens, and six updates of 171 tokens or fewer."""
    load = replace(LOAD, tokens=2 * 512, updates=6)
    work, once = step_work(load, SLOW), step_work(LOAD, SLOW)
    assert work["matmul"] == pytest.approx(2 * once["matmul"])
    assert work["optimizer"] == pytest.approx(6 * (12 + 16) * TOY_PARAMETERS / 1e6)
    costs = Costs(matmul=0, attention=0, activations=0, optimizer=0, published=0, launches=1.0)
    assert step_seconds(load, SLOW, costs) == pytest.approx(4 * 6 * 2 * 3)  # layers, updates, rows, passes
    # an update of 512 / 4 tokens is a single row, so gradients reuse the memory of activations
    assert peak_bytes(replace(load, updates=8)) == peak_bytes(replace(LOAD, tokens=128))


def test_load_counts_epochs_and_mini_batches():
    """8 rollouts in 4 groups make at most 4 mini-batches."""
    given = config("--seq-len", "128", "--orchestrator.rollouts-per-example", "2")
    several = config(
        *("--seq-len", "128", "--orchestrator.rollouts-per-example", "2"),
        *("--trainer.mini-batches", "6", "--trainer.epochs-per-batch", "3"),
    )
    once, load = trainer_load(given, SHAPE, on_cpu()), trainer_load(several, SHAPE, on_cpu())
    assert (once.tokens, once.updates) == (8 * 128, 1)
    assert (load.tokens, load.updates) == (3 * 8 * 128, 3 * 4)
    mixed = config(
        *("--seq-len", "128", "--orchestrator.rollouts-per-example", "2", "--trainer.mini-batches", "2"),
        *("--trainer.supervised.path", "chats.jsonl", "--trainer.supervised.batch-size", "5"),
    )
    assert trainer_load(mixed, SHAPE, on_cpu()).tokens == (8 + 2 * 5) * 128
    check = check_forecast(forecast_trainer(several, SHAPE, on_cpu(), threads=1))
    assert check.seen.startswith("trainer, at most 3,072 tokens in 12 updates a step: ")


def measured(seconds, total, tokens, gib):
    return {
        "seconds": seconds,
        "time/total": total,
        "tokens": tokens,
        "tokens_computed": tokens,
        "samples": tokens / 64,
        "updates": 1,
        "peak_memory_gib": gib,
    }


def test_comparison_uses_the_tokens_of_the_median_step():
    forecast = forecast_trainer(config("--seq-len", "256"), SHAPE, on_cpu(), threads=1)
    steps = [
        {**measured(s, s + 1.0, 512.0, g), "tokens_computed": 400.0}
        for s, g in ((9, 1.0), (2, 1.5), (3, 1.4))
    ]
    comparison = compare(forecast, steps)
    assert (comparison.seconds, comparison.gib) == (3.0, 1.5)
    assert (comparison.forecast.load.tokens, comparison.forecast.load.length) == (400, 64)
    assert comparison.lines[1].startswith("Measured in 3 steps: 3 s a step (+")
    assert comparison.values["measured_gib"] == 1.5
    assert comparison.values["rest_seconds"] == 2.5  # without the first step, the warm-up


# one second for 1,000 tokens; nothing else takes time
SECOND = TrainerForecast(
    load=replace(LOAD, row=1024),
    memory=2 * 2**30,
    speed=GpuSpeed(flops=6.0 * TOY_PARAMETERS * 1000, bandwidth=1e30),
    costs=Costs(matmul=1, attention=0, activations=0, optimizer=0, published=0, launches=0),
)


def test_refined_forecast_has_the_median_factor_and_its_spread():
    """Steps of 1, 2 and 4 forecast seconds took 2, 3 and 12: factors 2, 1.5 and 3."""
    steps = [measured(2, 3, 1000, 1.0), measured(3, 3.5, 2000, 1.0), measured(12, 14, 4000, 3.0)]
    rest = refine(SECOND, steps)
    assert rest.factors == pytest.approx((1.5, 2.0, 3.0))
    assert rest.seconds == pytest.approx((3.0, 4.0, 6.0))  # of the median step with 2,000 tokens
    assert rest.other_seconds == 1.0  # median of 1, 0.5 and 2
    assert rest.seconds_left(10) == pytest.approx((40.0, 50.0, 70.0))
    assert rest.gib == pytest.approx((3.0, 3.0, 3.3))  # a row was full, so the peak is that of the rest
    assert rest.text == (
        "4 s (3 to 6) of training and 1 s of other work (rollouts, checkpoints) a step, "
        "500 tokens/s (333 to 667) in training, peak memory 3 GiB (3 to 3.3)"
    )
    assert describe_time_left(rest, 10) == "50 s (40 s to 70 s) left for 10 steps"


def test_refined_memory_is_that_of_the_forecast_until_a_row_is_full():
    assert refine(SECOND, [measured(1, 1, 1000, 1.0)]).gib == pytest.approx((1.0, 2.0, 2.2))
    rest = refine(SECOND, [measured(1, 1, 1024, 1.0)])
    assert rest.factors == pytest.approx((1.024**-1 / 1.1, 1.024**-1, 1.024**-1 * 1.1))
    assert rest.gib == pytest.approx((1.0, 1.0, 1.1))
