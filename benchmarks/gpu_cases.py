"""Measurements of benchmarks/gpu.py. Each case is a process, so that it starts with all memory free.

    python benchmarks/gpu_cases.py PART SETTINGS.json RESULT.json

A part calls `report(row, figures)` after each measurement. Reported rows are kept if a later one fails.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_correctness
from gpu_model import SHAPES, make_model

from buckeye.base.process import die_with_parent
from buckeye.base.storage import write_file

HERE = Path(__file__).parent
WARM_UP = 1
GROUP = 16  # rollouts per prompt
_CACHE_SHARE = 0.85  # of the free memory; the rest is for weights and logits
_SAMPLE_SECONDS = 0.25

Settings = dict[str, Any]
Figures = dict[str, Any]
Report = Callable[[str, Figures], None]


def describe(settings: Settings, report: Report) -> None:
    """Report the device and its two limits, and write the model that all cases use."""
    import torch

    from buckeye.trainer.learner import peak_flops

    device = torch.device(settings["device"])
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    parameters = make_model(Path(settings["model"]), settings["size"], device=device)
    facts = {
        "parameters": parameters,
        "model_seconds": time.perf_counter() - started,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else None,
        "peak_flops": peak_flops(device),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **(_limits(device) if on_gpu else {}),
    }
    report("device", facts)


def _limits(device: Any) -> Figures:
    """Return bytes per second of a large copy, read and written, and FLOP/s of a large bfloat16 product."""
    import torch

    source = torch.randn(2**30, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = 2 * source.numel() * source.element_size() / _median_seconds(lambda: target.copy_(source))
    return {"bandwidth": copied, "product_flops": 2 * 8192**3 / _median_seconds(lambda: a @ b)}


def _median_seconds(work: Callable[[], Any]) -> float:
    import torch

    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def train(settings: Settings, report: Report) -> None:
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
            learner.micro_batch_size.most = learner.micro_batch_size.tokens = row["length"]
            try:
                figures = _steps(learner, loss, row, settings)
            except RuntimeError as error:
                report(row["name"], {"error": str(error).partition("\n")[0][:300]})
                learner.clear_gradients()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                figures["forecast_gib"] = _forecast(settings, row)
                report(row["name"], figures)


def _steps(learner: Any, loss: Any, row: Settings, settings: Settings) -> Figures:
    import torch

    device, length, samples = learner.ranks.device, row["length"], row["samples"]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, speeds = [], []
    for step in range(WARM_UP + row["steps"]):
        batch = _random_batch(step, length, samples, SHAPES[settings["size"]]["vocab_size"])
        _wait_for(device)
        started = time.perf_counter()
        record = loss.backward(batch, batch.samples)
        update = learner.update(record["loss"], tokens=samples * length, samples=samples)
        _wait_for(device)
        seconds.append(time.perf_counter() - started)
        speeds.append(learner.speed(samples * length, seconds[-1]))
        if not update.applied:
            raise RuntimeError(f"step {step}: loss {record['loss']}, gradient norm {update.grad_norm}")
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


def _forecast(settings: Settings, row: Settings) -> float | None:
    """Return the GPU memory that `rl doctor` plans for these steps, in GiB."""
    from buckeye.config.rl import RLConfig
    from buckeye.launch.preflight.devices import gpus
    from buckeye.launch.preflight.fitting import hardware_of
    from buckeye.launch.preflight.memory import plan_memory
    from buckeye.launch.preflight.model import read_shape

    if settings["device"] != "cuda":
        return None
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
    needs = plan_memory(config, shape, hardware_of(config, gpus()))
    return sum(n.total for n in needs if n.process.startswith("trainer") and n.place != "main memory") / 2**30


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


def _wait_for(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(settings: Settings, report: Report) -> None:
    """Sample with the embedded engine, without HTTP, with each number of sequences in `counts`.

    Groups of 16 share a prompt of `prompt` tokens; each sequence gets `new_tokens`.
    """
    import torch

    from buckeye.config.inference import InferenceConfig
    from buckeye.inference.server.server import load_engine

    counts, new_tokens, prompt = settings["counts"], settings["new_tokens"], settings["prompt"]
    directory, device = Path(settings["model"]), torch.device(settings["device"])
    max_len = prompt + new_tokens
    config = InferenceConfig.model_validate(
        {
            "model": {"name": str(directory), "device": settings["device"], "max_model_len": max_len},
            "max_num_seqs": max(counts),
            "kv_cache_gb": _cache_gb(directory, device, max(counts), max_len),
        }
    )
    engine = load_engine(config, directory)
    cache = engine.decoder.cache
    _generate(engine, settings, 1, new_tokens=min(8, new_tokens))
    for count in counts:
        _generate(engine, settings, count, new_tokens=min(8, new_tokens))
        _wait_for(device)
        started = time.perf_counter()
        steps = _generate(engine, settings, count, new_tokens=new_tokens)
        seconds = time.perf_counter() - started
        running = min(count, cache.slots)
        full = [step for step in steps if step.running == running and not step.prefilled]
        step_seconds = statistics.median(step.seconds for step in full)
        read = _bytes_read(engine, running, statistics.mean(step.context for step in full))
        report(
            str(count),
            {
                "tokens_per_second": running / step_seconds,
                "with_prompts_per_second": count * new_tokens / seconds,
                "step_ms": 1000 * step_seconds,
                "bytes_per_step": read,
                "slots": cache.slots,
                "dtype": str(cache.kv.dtype).removeprefix("torch."),
                "peak_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
            },
        )


def _bytes_read(engine: Any, sequences: int, context: float) -> float:
    """Return the minimum bytes that a decode step reads: each weight, visible key and visible value once."""
    kv = engine.decoder.cache.kv
    a_token = kv.shape[0] * kv.shape[2] * kv.shape[4] * kv.element_size()
    return engine.decoder.weights.num_parameters * kv.element_size() + sequences * context * a_token


def _cache_gb(directory: Path, device: Any, concurrency: int, max_len: int) -> float:
    """Return the cache size for all sequences, or for as many as fit."""
    import psutil
    import torch

    from buckeye.inference.engine.architecture import read_spec
    from buckeye.inference.engine.kv_cache import slot_bytes
    from buckeye.inference.engine.weights import Checkpoint, auto_dtype

    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    dtype = auto_dtype(Checkpoint(directory), device)
    wanted = concurrency * slot_bytes(read_spec(directory), max_len, dtype)
    return min(1.01 * wanted, _CACHE_SHARE * free) / 1e9


class _Step:
    """One engine step: seconds, running sequences, whether prompts were prefilled, and mean context."""

    def __init__(self, seconds: float, running: int, prefilled: bool, context: float) -> None:
        self.seconds, self.running, self.prefilled, self.context = seconds, running, prefilled, context


def _prompts(settings: Settings, count: int) -> list[list[int]]:
    draw = random.Random(count)
    vocab = SHAPES[settings["size"]]["vocab_size"]
    different = [
        [draw.randrange(vocab) for _ in range(settings["prompt"])] for _ in range(-(-count // GROUP))
    ]
    return [different[i // GROUP] for i in range(count)]


def _generate(engine: Any, settings: Settings, count: int, *, new_tokens: int) -> list[_Step]:
    """Sample until all sequences end; return the steps."""
    from buckeye.inference.engine.sequences import Sequence
    from buckeye.inference.types import SamplingParams

    sequences = [
        Sequence(tuple(prompt), SamplingParams(max_tokens=new_tokens, seed=seed))
        for seed, prompt in enumerate(_prompts(settings, count))
    ]
    engine.submit(sequences)
    steps, more = [], True
    while more:
        before, started = engine.counters["prompt_tokens"], time.perf_counter()
        more = engine.step()
        seconds, running = time.perf_counter() - started, len(engine.running)
        context = float(engine.running.position[:running].mean()) if running else 0.0
        steps.append(_Step(seconds, running, engine.counters["prompt_tokens"] > before, context))
    for sequence in sequences:
        if sequence.error is not None or len(sequence.token_ids) != new_tokens:
            raise RuntimeError(f"a sequence ended after {len(sequence.token_ids)} tokens: {sequence.error}")
    return steps


def rival(settings: Settings, report: Report) -> None:
    """Sample as `decode` does with `generate_batch` of transformers; the second of two calls is timed."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device, new_tokens = torch.device(settings["device"]), settings["new_tokens"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
    for count in settings["counts"]:
        prompts = _prompts(settings, count)
        for _ in range(2):
            started = time.perf_counter()
            results = model.generate_batch(prompts, generation, persistent_manager=True)
            seconds = time.perf_counter() - started
        tokens = sum(len(result.generated_tokens) for result in results.values())
        if tokens != count * new_tokens:
            raise RuntimeError(f"{tokens} tokens instead of {count * new_tokens}")
        report(str(count), {"with_prompts_per_second": tokens / seconds})


def reinforce(settings: Settings, report: Report) -> None:
    """Run the `rl` launcher; report medians over all steps except the first."""
    folder = Path(settings["folder"])
    config = folder / "rl.json"
    config.write_text(json.dumps(_run_config(settings, folder / "run")), encoding="utf-8")
    started = time.time()
    with _utilization(settings["device"]) as samples:
        subprocess.run([sys.executable, "-m", "buckeye", "rl", "@", str(config)], check=True)
    figures, first, last = _read_run(folder / "run" / "metrics.jsonl")
    busy = [share for when, share in samples if first <= when <= last]
    figures |= {
        "idle_share": 1 - statistics.mean(busy) if busy else None,
        "first_step_after_seconds": first - started,
        "seconds": time.time() - started,
    }
    report("run", figures | _devices(settings))


@contextmanager
def _utilization(device: str) -> Iterator[list[tuple[float, float]]]:
    """Yield (time, share of the last sampling interval in which a kernel ran), as nvidia-smi reports it."""
    samples: list[tuple[float, float]] = []
    if device != "cuda":
        yield samples
        return
    done = threading.Event()
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
            if found.returncode == 0:
                samples.append((time.time(), int(found.stdout.split()[0]) / 100))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _run_config(settings: Settings, output: Path) -> Settings:
    devices = _devices(settings)
    inference: Settings = {
        "backend": settings["backend"],
        "model": {"device": settings["device"]},
        "max_num_seqs": settings["batch"],
    }
    if settings["device"] == "cuda" and settings["backend"] == "vllm":
        inference["gpu_memory_utilization"] = devices["inference_share"]
    elif settings["device"] == "cuda":
        inference["kv_cache_gb"] = round(devices["inference_share"] * devices["gpu_gb"], 1)
    return {
        "output_dir": str(output),
        "max_steps": WARM_UP + settings["steps"],
        "model": {"name": settings["model"]},
        "inference_gpu_ids": devices["inference_gpu_ids"],
        "trainer_gpu_ids": devices["trainer_gpu_ids"],
        "trainer": {
            "model": {"device": settings["device"], **({"compile": {}} if settings["compile"] else {})},
            "optim": {"lr": 3e-6},
            "seq_len": max(settings["row"], 2 * settings["length"]),
        },
        "orchestrator": {
            "batch_size": settings["batch"],
            "rollouts_per_example": settings["group"],
            "seq_len": 2 * settings["length"] if settings["length"] < 256 else settings["length"] + 128,
            "sampling": {"max_tokens": settings["length"]},
            "env": [{"id": str(HERE / "letters.py"), "args": {"task": "emit"}}],
        },
        "inference": inference,
    }


def _devices(settings: Settings) -> Settings:
    """Return the GPUs of a run: two if available; of a single one the engine gets less than half."""
    from buckeye.launch.preflight.devices import this_machine

    if settings["device"] != "cuda":
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [1], "inference_share": None, "gpu_gb": None}
    gpus = this_machine().gpus
    if not gpus:
        raise RuntimeError("nvidia-smi shows no GPU that may be used")
    first, last = gpus[0], gpus[:2][-1]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    return {
        "inference_gpu_ids": [first],
        "trainer_gpu_ids": [last],
        "inference_share": 0.45 if first == last else 0.8,
        "gpu_gb": round(int(mebibytes) * 2**20 / 1e9, 1),
    }


def _read_run(metrics: Path) -> tuple[Figures, float, float]:
    """Return the figures of a run, and the times when its first and last step ended."""
    from buckeye.monitor.metrics import read_run

    trained = read_run(metrics).of("trainer")
    steps = sorted(trained)
    if len(steps) <= WARM_UP:
        raise RuntimeError(f"only {len(steps)} steps are in {metrics}")
    between = [trained[b]["time"] - trained[a]["time"] for a, b in itertools.pairwise(steps)]
    later = [trained[step] for step in steps[WARM_UP:]]

    def median(key: str) -> float:
        return statistics.median(record[key] for record in later)

    seconds = statistics.median(between)
    figures = {
        "step_seconds": seconds,
        "tokens_per_second": median("tokens") / seconds,
        "samples": median("samples"),
        "tokens": median("tokens"),
        **{f"{cause}_seconds": median(f"time/{cause}") for cause in ("wait", "compute", "publish")},
        "mismatch_kl": median("mismatch_kl"),
        "mfu": median("mfu") if "mfu" in later[0] else None,
        "peak_gib": median("peak_memory_gib"),
        "steps": len(steps),
    }
    return figures, trained[steps[0]]["time"], trained[steps[-1]]["time"]


PARTS: dict[str, Callable[[Settings, Report], None]] = {
    "device": describe,
    "correctness": gpu_correctness.measure,
    "rl": reinforce,
    "trainer": train,
    "engine": decode,
    "rival": rival,
}


def main() -> None:
    """Measure one case and write its figures to a file, row by row."""
    part, settings, result = sys.argv[1:]
    die_with_parent()
    logging.basicConfig(level=logging.WARNING)
    rows: dict[str, Figures] = {}

    def report(row: str, figures: Figures) -> None:
        rows[row] = figures
        write_file(Path(result), json.dumps(rows))

    PARTS[part](json.loads(Path(settings).read_text(encoding="utf-8")), report)


if __name__ == "__main__":
    main()
