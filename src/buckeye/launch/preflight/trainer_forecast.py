"""Forecast of a run's trainer on this machine, and the comparison with measured steps."""

from __future__ import annotations

import statistics
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
from buckeye.launch.preflight.model_shape import ModelShape

FORECAST = "forecast"
_MIN_SPREAD = 1.1  # a corrected forecast is uncertain by this factor, even if its steps took equally long
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
        updates = max(1, int(record["updates"]))
        return replace(self, load=replace(self.load, tokens=tokens, length=length, updates=updates))

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
    return _between(template, value, value / factor, value * factor)


def _between(template: str, value: float, low: float, high: float) -> str:
    unit = template.partition(" ")[2]
    ends = " to ".join(template.format(end).removesuffix(f" {unit}") for end in (low, high))
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
        wide, fast_bfloat16 = processor_has("avx512f"), hardware.fast_bfloat16
        speed = cpu_speed(threads, load.width, wide=wide, fast_bfloat16=fast_bfloat16)
        costs = CPU_COSTS
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
    updates = f" in {load.updates} updates" if load.updates > 1 else ""
    return ok(FORECAST, f"trainer, at most {load.tokens:,} tokens{updates} a step: {forecast.text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RefinedForecast:
    """Forecast of the rest of a run, corrected by measured steps.

    - `forecast`: of a step with the median number of tokens, before the correction
    - `factors`: measured divided by forecast seconds of a step: the minimum, the median and the maximum,
      at least 10 % apart
    - `other_seconds`: median time of a step outside of the trainer's work, such as the wait for rollouts
    - `gib`: peak memory so far, the expected one and its upper limit
    """

    forecast: TrainerForecast
    factors: tuple[float, float, float]
    other_seconds: float
    gib: tuple[float, float, float]

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of the trainer's work on a step: the lower limit, the expected value, the upper limit."""
        low, middle, high = self.factors
        seconds = self.forecast.seconds
        return low * seconds, middle * seconds, high * seconds

    def seconds_left(self, steps: int) -> tuple[float, float, float]:
        """Return the time of `steps` steps: the lower limit, the expected value, the upper limit."""
        low, middle, high = (steps * (seconds + self.other_seconds) for seconds in self.seconds)
        return low, middle, high

    @property
    def text(self) -> str:
        """The forecast as text, with the range of each value."""
        low, middle, high = self.seconds
        tokens, (peak, gib, limit) = self.forecast.load.tokens, self.gib
        return (
            f"{_between('{:.3g} s', middle, low, high)} of training and "
            f"{self.other_seconds:.3g} s of other work (rollouts, checkpoints) a step, "
            f"{_between('{:,.0f} tokens/s', tokens / middle, tokens / high, tokens / low)} in training, "
            f"peak memory {_between('{:.3g} GiB', gib, peak, limit)}"
        )


def refine(forecast: TrainerForecast, steps: Sequence[Mapping[str, float]]) -> RefinedForecast:
    """Correct a forecast by the trainer's metrics of measured steps, without the first one (warm-up).

    The measured peak is a lower limit of the memory. While no micro-batch had the maximum length, longer
    samples may still need the memory of the forecast.
    """
    of_steps = [forecast.of_step(step) for step in steps]
    factors = sorted(
        step["seconds"] / expected.seconds for step, expected in zip(steps, of_steps, strict=True)
    )
    middle = statistics.median(factors)
    peak = max(step["peak_memory_gib"] for step in steps)
    is_full = any(f.load.tokens >= f.load.updates * f.load.ranks * f.load.row for f in of_steps)
    expected_peak = peak if is_full else max(peak, forecast.memory / 2**30)
    return RefinedForecast(
        forecast=sorted(of_steps, key=lambda f: f.load.tokens)[len(of_steps) // 2],
        factors=(min(factors[0], middle / _MIN_SPREAD), middle, max(factors[-1], _MIN_SPREAD * middle)),
        other_seconds=max(0.0, statistics.median(step["time/total"] - step["seconds"] for step in steps)),
        gib=(peak, expected_peak, MEMORY_RANGE * expected_peak),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Forecast of the first steps, and the measured values: seconds, tokens, and the peak in GiB.

    `rest` is the corrected forecast.
    """

    forecast: TrainerForecast
    seconds: float
    tokens: float
    gib: float
    rest: RefinedForecast

    @property
    def lines(self) -> tuple[str, str, str]:
        """Log lines of the forecast, of what happened, and of the rest of the run."""
        tokens_per_second = self.tokens / self.seconds
        alone = "" if self.forecast.load.on_gpu else " on cores that no other program uses"
        return (
            f"Forecast of a trainer step{alone}: {self.forecast.text}",
            f"Measured in {MEASURED_STEPS} steps: {self.seconds:.3g} s a step "
            f"({self.seconds / self.forecast.seconds - 1:+.0%}), {tokens_per_second:,.0f} tokens/s, "
            f"peak memory {self.gib:.3g} GiB ({self.gib * 2**30 / self.forecast.memory - 1:+.0%})",
            f"Forecast of the rest of the run: {self.rest.text}",
        )

    @property
    def values(self) -> dict[str, float]:
        """Forecast and measured values for the record of the run."""
        values = {
            "forecast_seconds": self.forecast.seconds,
            "measured_seconds": self.seconds,
            "forecast_gib": self.forecast.memory / 2**30,
            "measured_gib": self.gib,
            "rest_seconds": self.rest.seconds[1],
            "rest_gib": self.rest.gib[1],
        }
        return {name: round(value, 4) for name, value in values.items()}


def compare(forecast: TrainerForecast, steps: Sequence[Mapping[str, float]]) -> Comparison:
    """Compare a forecast with the trainer's metrics of the first steps (at least 2)."""
    middle = sorted(steps, key=lambda step: step["seconds"])[len(steps) // 2]
    return Comparison(
        forecast.of_step(middle),
        middle["seconds"],
        middle["tokens_computed"],
        max(step["peak_memory_gib"] for step in steps),
        refine(forecast, steps[1:]),
    )
