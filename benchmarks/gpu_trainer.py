"""Trainer steps on one device, for benchmarks/gpu.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_model import SHAPES, make_model

HERE = Path(__file__).parent
WARM_UP = 1

Settings = dict[str, Any]
Figures = dict[str, Any]
Report = Callable[[str, Figures], None]


def measure(settings: Settings, report: Report) -> None:
    """Measure trainer steps on random samples, one sample per row of the batch.

    Each of `rows` has a name, the `length` of samples, their number, whether activations are recomputed, and
    the number of measured steps.
    """
    import torch

    from buckeye.config.trainer import TrainerConfig
    from buckeye.trainer.batch_loss import BatchLoss
    from buckeye.trainer.setup import build_learner, trainer_process

    rows = settings["rows"]
    if not Path(settings["model"]).exists():
        make_model(Path(settings["model"]), settings["size"], device=torch.device(settings["device"]))
    config = TrainerConfig.model_validate(_trainer_config(settings, max(row["length"] for row in rows)))
    with trainer_process(config, "benchmark") as ranks:
        learner = build_learner(config, ranks, None, max_steps=None)
        loss = BatchLoss(config, learner, None)
        recomputed = False
        for row in rows:  # those that recompute come last
            if row["recompute"] and not recomputed:
                learner.policy.checkpoint_activations(every=1)
                recomputed = True
            learner.micro_batch_size.max_tokens = learner.micro_batch_size.tokens = row["length"]
            try:
                figures = _steps(learner, loss, row, settings)
            except RuntimeError as error:
                report(row["name"], {"error": str(error).partition("\n")[0][:300]})
                learner.clear_gradients()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                report(row["name"], figures | _forecast(settings, row))


def _steps(learner: Any, loss: Any, row: Settings, settings: Settings) -> Figures:
    import torch

    device, length, samples = learner.ranks.device, row["length"], row["samples"]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, speeds = [], []
    for step in range(WARM_UP + row["steps"]):
        batch = _random_batch(step, length, samples, SHAPES[settings["size"]]["vocab_size"])
        wait_for(device)
        started = time.perf_counter()
        loss.start_step()
        updates = [learner.apply_gradient(loss.backward(batch, batch.samples))]
        update = learner.finish_step(updates, tokens=samples * length, samples=samples)
        wait_for(device)
        seconds.append(time.perf_counter() - started)
        speeds.append(learner.throughput(samples * length, seconds[-1]))
        if update["skipped"] or not update["grad_norm"]:
            raise RuntimeError(f"step {step}: loss {updates[0].loss}, gradient norm {update['grad_norm']}")
    measured = speeds[WARM_UP:]
    speed = {name: statistics.median(s[name] for s in measured) for name in measured[0]}
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "tokens_per_second": speed["tokens_per_second"],
        "gflops_per_second": speed["gflops_per_second"],
        "mfu": speed.get("mfu"),
        "peak_gib": peak,
        "flash": learner.policy.flash,
        "step_seconds": statistics.median(seconds[WARM_UP:]),
        "first_step_seconds": seconds[0],
    }


def _trainer_config(settings: Settings, length: int, *, recompute: bool = False) -> Settings:
    model: Settings = {"name": settings["model"], "device": settings["device"]}
    if recompute:
        model["ac"] = {}
    if settings.get("compile"):
        model["compile"] = {}
    if settings["lora"]:
        model["experimental"] = {"lora": {"rank": 16}}
    return {
        "model": model,
        "optim": {"lr": 1e-6},
        "seq_len": length,
        "output_dir": settings["folder"],
        "log": {"level": "warning"},
    }


def _forecast(settings: Settings, row: Settings) -> Figures:
    """Return the forecast of `rl doctor` for these steps: GPU memory of tensors in GiB, and seconds."""
    from buckeye.config.rl import RLConfig
    from buckeye.launch.preflight.devices import gpus
    from buckeye.launch.preflight.forecast import peak_bytes, step_seconds
    from buckeye.launch.preflight.memory_check import find_hardware
    from buckeye.launch.preflight.model_shape import read_shape
    from buckeye.launch.preflight.trainer_forecast import forecast_trainer

    if settings["device"] != "cuda":
        return {"forecast_gib": None, "forecast_seconds": None}
    trainer = _trainer_config(settings, row["length"], recompute=row["recompute"])
    config = RLConfig.model_validate(
        {
            "output_dir": trainer.pop("output_dir"),
            "model": {"name": settings["model"]},
            "orchestrator": {"env": [{"id": str(HERE / "letters.py")}], "seq_len": row["length"]},
            "inference": {},
            "trainer": trainer,
        }
    )
    shape = read_shape(Path(settings["model"]))
    assert shape is not None
    forecast = forecast_trainer(config, shape, find_hardware(config, gpus()), threads=1)
    if forecast is None:
        return {"forecast_gib": None, "forecast_seconds": None}
    load = replace(forecast.load, tokens=row["length"] * row["samples"], length=row["length"])
    seconds = step_seconds(load, forecast.speed, forecast.costs)
    return {"forecast_gib": peak_bytes(load) / 2**30, "forecast_seconds": seconds}


def _random_batch(step: int, length: int, samples: int, vocab: int) -> Any:
    import numpy as np

    from buckeye.transport.batches import Batch, Sample

    draw = np.random.default_rng(step)

    def sample(advantage: float) -> Sample:
        mask = np.ones(length, np.bool_)
        mask[0] = False
        return Sample(
            token_ids=draw.integers(0, vocab, length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, np.float32(-math.log(vocab)), np.float32(0)),
            versions=np.where(mask, np.int32(step), np.int32(-1)),
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            temperature=1.0,
        )

    return Batch(
        step=step, samples=tuple(sample(1.0 - 2.0 * (i % 2)) for i in range(samples)), orchestrator_state={}
    )


def wait_for(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
