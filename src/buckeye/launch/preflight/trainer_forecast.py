"""Forecast of a run's trainer on this machine, and the comparison with measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from buckeye.base.gpu_speeds import GpuSpeed, gpu_speed
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, ok, skipped
from buckeye.launch.preflight.forecast import (
    CPU_COSTS,
    GPU_COSTS,
    MEMORY_RANGE,
    TIME_RANGE,
    Costs,
    TrainerLoad,
    cpu_speed,
    publish_seconds,
    step_seconds,
)
from buckeye.launch.preflight.memory_plan import Hardware, plan_memory, processor_has, trainer_load
from buckeye.launch.preflight.model import ModelShape

FORECAST = "forecast"
MEASURED_STEPS = 3
"""Number of steps after which a forecast is compared with what happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerForecast:
    """Forecast of the steps of a trainer. `memory` is the peak of a rank in bytes.

    On a GPU this is the memory of tensors, as `peak_memory_gib` of the metrics; on a CPU that of the process.
    """

    load: TrainerLoad
    memory: int
    speed: GpuSpeed
    costs: Costs

    @property
    def seconds(self) -> float:
        """Seconds of a step, including the publication of weights."""
        return step_seconds(self.load, self.speed, self.costs) + publish_seconds(self.load, self.costs)

    def of_step(self, record: Mapping[str, float]) -> TrainerForecast:
        """Return the forecast for the tokens of a measured step, from its metrics."""
        tokens = max(1, int(record["tokens_computed"]))
        length = max(1, int(record["tokens"] / max(1, record["samples"])))
        return replace(self, load=replace(self.load, tokens=tokens, length=length))

    @property
    def text(self) -> str:
        """The forecast as text, with the range of each value."""
        seconds, gib, tokens = self.seconds, self.memory / 2**30, self.load.tokens
        return (
            f"{_range('{:.3g} s', seconds, TIME_RANGE)} a step, "
            f"{_range('{:,.0f} tokens/s', tokens / seconds, TIME_RANGE)}, "
            f"peak memory {_range('{:.3g} GiB', gib, MEMORY_RANGE)}"
        )


def _range(template: str, value: float, factor: float) -> str:
    unit = template.partition(" ")[2]
    ends = " to ".join(
        template.format(end).removesuffix(f" {unit}") for end in (value / factor, value * factor)
    )
    return f"{template.format(value)} ({ends})"


def forecast_trainer(
    config: RLConfig, shape: ModelShape, hardware: Hardware, *, threads: int
) -> TrainerForecast | None:
    """Return the forecast for samples of the maximum length, or None for a GPU of unknown speed.

    `threads` is the number of threads of a trainer process.
    """
    load = trainer_load(config, shape, hardware)
    speed: GpuSpeed | None
    if load.on_gpu:
        names = {gpu.index: gpu.name for gpu in hardware.gpus}
        speed, costs = gpu_speed(names.get(config.trainer_gpu_ids[0], hardware.gpus[0].name)), GPU_COSTS
    else:
        speed, costs = cpu_speed(threads, load.width, wide=processor_has("avx512f")), CPU_COSTS
    if speed is None:
        return None
    need = next(need for need in plan_memory(config, shape, hardware) if need.process == "trainer 0")
    memory = sum(part.size for part in need.parts if not (load.on_gpu and part.what == "program"))
    return TrainerForecast(load=load, memory=memory, speed=speed, costs=costs)


def check_forecast(forecast: TrainerForecast | None) -> Check:
    """Report the forecast of the trainer, for the longest possible samples."""
    if forecast is None:
        return skipped(FORECAST, "the speed of this type of GPU, or the sizes of this model, are unknown")
    load = forecast.load
    return ok(FORECAST, f"trainer, at most {load.tokens:,} tokens a step: {forecast.text}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Forecast of the first steps, and the measured values: seconds, tokens, and the peak in GiB."""

    forecast: TrainerForecast
    seconds: float
    tokens: float
    gib: float

    @property
    def lines(self) -> tuple[str, str]:
        """A log line of the forecast, and one of what happened."""
        tokens_per_second = self.tokens / self.seconds
        alone = "" if self.forecast.load.on_gpu else " on cores that no other program uses"
        return (
            f"Forecast of a trainer step{alone}: {self.forecast.text}",
            f"Measured in {MEASURED_STEPS} steps: {self.seconds:.3g} s a step "
            f"({self.seconds / self.forecast.seconds - 1:+.0%}), {tokens_per_second:,.0f} tokens/s, "
            f"peak memory {self.gib:.3g} GiB ({self.gib * 2**30 / self.forecast.memory - 1:+.0%})",
        )

    @property
    def values(self) -> dict[str, float]:
        """Forecast and measured values for the record of the run."""
        values = {
            "forecast_seconds": self.forecast.seconds,
            "measured_seconds": self.seconds,
            "forecast_gib": self.forecast.memory / 2**30,
            "measured_gib": self.gib,
        }
        return {name: round(value, 4) for name, value in values.items()}


def compare(forecast: TrainerForecast, steps: Sequence[Mapping[str, float]]) -> Comparison:
    """Compare a forecast with the trainer's metrics of the first steps."""
    middle = sorted(steps, key=lambda step: step["seconds"])[len(steps) // 2]
    return Comparison(
        forecast.of_step(middle),
        middle["seconds"],
        middle["tokens_computed"],
        max(step["peak_memory_gib"] for step in steps),
    )
