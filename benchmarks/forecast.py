"""Compare the forecast of `rl doctor` with measured trainings, row by row, and fit its constants.

    python benchmarks/forecast.py [CSV]         errors of the product's constants (gpu_trainings.csv)
    python benchmarks/forecast.py [CSV] --fit   fit them, leaving out each row, then each model
    python benchmarks/forecast.py --cpu         measure steps on one core; print the rows of own_trainings.csv

gpu_trainings.csv has trainings that prime-rl published (`benchmarks/baselines` at 559b447, Apache-2.0):
tokens a second of all GPUs, seconds a step, and GiB of a GPU at the peak, with `micro_batches` of one sample.
own_trainings.csv has the same columns for Buckeye's trainer (`kind` is `buckeye`), and `dtype`. The sizes of
models are in model_shapes.csv, or in the `config.json` of a local model.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buckeye.base.gpu_speeds import GpuSpeed, gpu_speed
from buckeye.config.trainer import LoRAConfig
from buckeye.launch.preflight import forecast
from buckeye.launch.preflight.devices import GPU_MEMORY_GB, short_name
from buckeye.launch.preflight.forecast import CPU_COSTS, GPU_COSTS, Costs, TrainerLoad, cpu_speed
from buckeye.launch.preflight.model import find_model
from buckeye.launch.preflight.model_shape import ModelShape, parse_shape, read_shape

HERE = Path(__file__).parent
FITTED = ("matmul", "grouped", "attention", "activations", "routing", "adapter")
WHOLE_LOGIT = 18.0  # bytes per logit of a loss without chunks, fitted on trainings of kind `sft`
ROUTED_COPIES = TrainerLoad.__dataclass_fields__["routed_copies"].default
WITHIN = {"memory": 0.2, "tokens/s": 0.3}
GIB = 2**30

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Constants:
    """All fitted constants of a forecast."""

    costs: Costs
    whole_logit: float = WHOLE_LOGIT
    routed_copies: float = ROUTED_COPIES


@cache
def shape_of(model: str) -> ModelShape:
    """Return the sizes of a model. A name matches the longest name of the table that it begins with."""
    with (HERE / "model_shapes.csv").open() as lines:
        known = [row for row in csv.DictReader(lines) if model.startswith(row["model"])]
    if known:
        best = max(known, key=lambda row: len(row["model"]))
        return parse_shape({key: int(value) for key, value in best.items() if key != "model"})
    path = find_model(model)
    shape = None if path is None else read_shape(path)
    if shape is None:
        raise LookupError(f"the sizes of {model} are unknown: add a line to model_shapes.csv")
    return shape


def load_of(row: Row, constants: Constants) -> TrainerLoad:
    """Return the work of a row.

    prime-rl's trainer keeps frozen weights in float32; its RL computes logits in chunks, its SFT does not.
    """
    shape, ranks, rank = shape_of(row["model"]), int(row["gpus"]), int(row["lora_rank"])
    length, context_ranks = int(row["seq_len"]), int(row.get("cp") or 1)
    adapter = shape.adapter(LoRAConfig(rank=rank)) if rank else 0
    own, trained = row["kind"] == "buckeye", adapter or shape.parameters
    on_gpu = row["device"] != "CPU"
    return TrainerLoad(
        shape=shape,
        tokens=ranks // context_ranks * int(row["micro_batches"]) * length,
        row=length // context_ranks,
        length=length,
        moments=8 * trained,
        ranks=ranks,
        shards=ranks,
        adapter=adapter,
        adapted=7 if adapter else 0,
        width=4 if row.get("dtype") == "float32" else 2,
        frozen=(2 if own else 4) * shape.parameters if adapter else 0,
        recomputed=shape.layers if row["activation"] in ("Recompute", "Offload") else 0,
        offloaded=row["activation"] == "Offload",
        on_gpu=on_gpu,
        padded=not on_gpu,
        ampere_attention=not row["attention"].endswith(("_3", "_4")),
        whole_logits=constants.whole_logit if row["kind"] == "sft" else 0,
        routed_copies=constants.routed_copies,
        published=0 if adapter or row["kind"] != "rl" else 2 * shape.parameters,
    )


def speed_of(row: Row) -> GpuSpeed:
    speed = (
        cpu_speed(1, 4 if row["dtype"] == "float32" else 2, wide=True, fast_bfloat16=True)
        if row["device"] == "CPU"
        else gpu_speed(row["device"])
    )
    if speed is None:
        raise LookupError(f"the speed of {row['device']} is unknown")
    return speed


def memory_gib(row: Row) -> float:
    """Return the memory of a GPU of a row, in GiB."""
    name = row["device"].replace(" ", "")
    return max(gb for kind, gb in GPU_MEMORY_GB.items() if short_name(kind) in name) * 1e9 / GIB


@dataclass(frozen=True, slots=True)
class Figures:
    """Peak GiB of a device, seconds of a step, and tokens per second of all devices."""

    gib: float
    seconds: float
    tokens_per_second: float


def predict(row: Row, constants: Constants) -> Figures:
    load = load_of(row, constants)
    seconds = forecast.step_seconds(load, speed_of(row), constants.costs)
    total = seconds + forecast.publish_seconds(load, constants.costs)
    return Figures(forecast.peak_bytes(load) / GIB, seconds, load.tokens / total)


def fit(rows: Sequence[Row]) -> Constants:
    """Return the constants with the least squares of relative errors on the rows."""
    equations, columns = [], (*FITTED, "published")
    for row in rows:
        load = load_of(row, Constants(GPU_COSTS))
        work = forecast.step_work(load, speed_of(row)) | {"published": float(load.published)}
        step, total = float(row["step_seconds"]), load.tokens / float(row["tokens_per_second"])
        fixed = work["optimizer"] * GPU_COSTS.optimizer
        amounts = [work[name] for name in columns]
        equations.append([amount / total for amount in amounts] + [1 - fixed / total])
        equations.append([amount / step for amount in [*amounts[:-1], 0.0]] + [1 - fixed / step])
    matrix = np.array(equations)
    found = non_negative_least_squares(matrix[:, :-1], matrix[:, -1])
    costs = replace(GPU_COSTS, **dict(zip(columns, map(float, found), strict=True)))
    constants = Constants(costs)
    for name, values in (
        ("routed_copies", np.arange(0, 20.5, 0.5)),
        ("whole_logit", np.arange(8, 24.5, 0.5)),
    ) * 2:
        candidates = [replace(constants, **{name: float(value)}) for value in values]
        constants = min(candidates, key=lambda c: sum(memory_error(row, c) ** 2 for row in rows))
    return constants


def non_negative_least_squares(
    matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the x >= 0 with the least |matrix x - target|^2, by coordinate descent."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    squares, products = (matrix / scale).T @ (matrix / scale), (matrix / scale).T @ target
    found = np.zeros(len(products))
    for _ in range(3000):
        for i in range(len(found)):
            found[i] = max(0.0, found[i] + products[i] - squares[i] @ found) if squares[i, i] else 0.0
    return found / scale


def memory_error(row: Row, constants: Constants) -> float:
    return forecast.peak_bytes(load_of(row, constants)) / GIB / float(row["peak_gib"]) - 1


def known(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with a known model and device."""
    for row in rows:
        try:
            shape_of(row["model"]), speed_of(row)
        except LookupError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            yield row


def succeeded(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["success"] == "True"]


def left_out(rows: Sequence[Row], group: Callable[[Row], object]) -> list[tuple[Row, Figures]]:
    """Return the forecast of each successful row by the constants of the rows of all other groups."""
    good = succeeded(rows)
    constants = {key: fit([row for row in good if group(row) != key]) for key in {group(row) for row in good}}
    return [(row, predict(row, constants[group(row)])) for row in good]


def errors(row: Row, figures: Figures) -> dict[str, float]:
    """Return the relative errors of a forecast, without those that the row has no measurement for."""
    pairs = {
        "memory": (figures.gib, float(row["peak_gib"] or 0)),
        "tokens/s": (figures.tokens_per_second, float(row["tokens_per_second"] or 0)),
        "seconds": (figures.seconds, float(row["step_seconds"] or 0)),
    }
    return {name: planned / measured - 1 for name, (planned, measured) in pairs.items() if measured}


def summary(title: str, results: Sequence[tuple[Row, Figures]]) -> str:
    found = [errors(row, figures) for row, figures in results]
    parts = []
    for name, bound in WITHIN.items():
        values = [abs(error[name]) for error in found if name in error]
        if values:
            within = sum(value <= bound for value in values)
            parts.append(
                f"{name} within {bound:.0%}: {within} of {len(values)} ({within / len(values):.0%}), "
                f"median {statistics.median(values):.1%}, maximum {max(values):.0%}"
            )
    return f"{title}: {'; '.join(parts)}"


def table(results: Sequence[tuple[Row, Figures]]) -> list[str]:
    lines = ["| device | model | kind | LoRA | tokens | activations | memory | seconds | tokens/s |"]
    lines.append(f"|{'---|' * 9}")
    for row, figures in results:
        found = errors(row, figures)
        cells = [f"{row['gpus']} x {row['device'].removeprefix('NVIDIA ')}", row["model"].rpartition("/")[2]]
        cells += [row[name] for name in ("kind", "lora_rank", "seq_len", "activation")]
        measured = {"memory": row["peak_gib"], "seconds": row["step_seconds"]}
        measured["tokens/s"] = row["tokens_per_second"]
        planned = {"memory": figures.gib, "seconds": figures.seconds, "tokens/s": figures.tokens_per_second}
        cells += [
            f"{planned[name]:,.4g} of {float(measured[name]):,.4g}, {found[name]:+.0%}"
            if name in found
            else "-"
            for name in ("memory", "seconds", "tokens/s")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def failures(rows: Sequence[Row], constants: Constants) -> list[str]:
    """Return a line for each row that failed: the memory that it would have needed."""
    lines = []
    for row in rows:
        if row["success"] != "True":
            gib, room = predict(row, constants).gib, memory_gib(row)
            verdict = "does not fit" if gib > room else "fits: another cause"
            what = (
                f"{row['device']}, {row['model']}, {row['kind']}, {row['seq_len']} tokens, {row['attention']}"
            )
            lines.append(f"failed ({row['error']}): {what}: {gib:.0f} of {room:.0f} GiB, {verdict}")
    return lines


CPU_CASES = (
    ("cpu/4x256", 64, 16, 0),
    ("cpu/8x512", 64, 16, 0),
    ("cpu/8x512", 64, 16, 16),
    ("cpu/6x576", 128, 4, 0),
    ("cpu/12x384", 256, 4, 0),
    ("cpu/4x256", 512, 4, 0),
    ("cpu/30x576", 128, 2, 0),
)
"""Measurements on a CPU: model, length and number of samples, and rank of the adapter (0: all weights)."""


def measure_on_cpu(model: str, length: int, samples: int, rank: int, dtype: str) -> str:
    """Return the row of a training step on one core, with the least processor time of several steps."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from buckeye.trainer.data.packing import pack_micro_batch
    from buckeye.trainer.model.attention import PACKED_ATTENTION
    from buckeye.trainer.model.policy import make_policy

    torch.set_num_threads(1)
    shape, device = shape_of(model), torch.device("cpu")
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    network = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    policy = make_policy(network, model, device, flash=True, compute_dtype=dtype)
    if rank:
        from buckeye.trainer.model.lora import add_adapter

        add_adapter(network, LoRAConfig(rank=rank), base=model, frozen_dtype=policy.compute_dtype)
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=1e-6)
    draw = np.random.default_rng(0)
    batch = [draw.integers(0, shape.vocabulary, length, dtype=np.int32) for _ in range(samples)]
    masks = [np.arange(length) > 0 for _ in batch]
    seconds = []
    for _ in range(6):
        started = time.process_time()
        with policy.cast_weights():
            row = pack_micro_batch(batch, masks, device)
            (-policy(row, torch.ones(len(row.targets)))[0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    rate, step = length * samples / min(seconds), min(seconds)
    cells = ("CPU", 1, model, "buckeye", rank, length, "None", "sdpa", 1, 1, samples, True, "", 0)
    return ",".join(map(str, (*cells, f"{rate:.1f}", f"{step:.4f}", 0, dtype)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", nargs="?", type=Path, default=HERE / "gpu_trainings.csv")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and leave out each row")
    parser.add_argument("--cpu", action="store_true", help="measure training steps on one core")
    arguments = parser.parse_args()
    if arguments.cpu:
        for dtype in ("float32", "bfloat16"):
            for case in CPU_CASES:
                print(measure_on_cpu(*case, dtype), flush=True)
        return
    with arguments.csv.open() as lines:
        rows = list(known(csv.DictReader(lines)))
    product = Constants(GPU_COSTS)
    if arguments.fit:
        single = left_out(rows, lambda row: id(row))
        print(*table(single), sep="\n")
        print(summary("without the row", single))
        print(summary("without the model", left_out(rows, lambda row: row["model"])))
        product = fit(succeeded(rows))
        for field in fields(Costs):
            print(f"{field.name} = {getattr(product.costs, field.name):.4g}")
        print(f"routed_copies = {product.routed_copies:g}, bytes per whole logit = {product.whole_logit:g}")
    results = [
        (row, predict(row, replace(product, costs=CPU_COSTS) if row["device"] == "CPU" else product))
        for row in succeeded(rows)
    ]
    if not arguments.fit:
        print(*table(results), sep="\n")
    print(summary("these constants", results))
    print(*failures(rows, product), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
