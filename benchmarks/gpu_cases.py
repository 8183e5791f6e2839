"""What benchmarks/gpu.py measures, one case in one process, so that each begins with all of the memory.

python benchmarks/gpu_cases.py model|trainer|engine|rl SETTINGS.json RESULT.json
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_model import SHAPES, make_model

from buckeye.base.process import die_with_parent

HERE = Path(__file__).parent
WARM_UP = 1
PROMPT_TOKENS = 32
_CACHE_SHARE = 0.85  # of the free memory; the rest is for weights and logits

Settings = dict[str, Any]
Figures = dict[str, Any]


def write_model(settings: Settings) -> Figures:
    """Write the model that all cases use; returns facts about it and the device."""
    import torch

    from buckeye.trainer.learner import peak_flops

    device = torch.device(settings["device"])
    parameters = make_model(Path(settings["model"]), settings["size"])
    return {
        "parameters": parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "peak_flops": peak_flops(device),
        "torch": torch.__version__,
    }


def train(settings: Settings) -> Figures:
    """Steps of the trainer on `samples` random samples of `length` tokens each, one sample a row."""
    import torch

    from buckeye.config.trainer import TrainerConfig
    from buckeye.trainer.batch_loss import BatchLoss
    from buckeye.trainer.setup import build_learner, trainer_process

    length, samples = settings["length"], settings["samples"]
    config = TrainerConfig.model_validate(_trainer_config(settings))
    with trainer_process(config, "benchmark") as ranks:
        learner = build_learner(config, ranks, None, max_steps=None)
        loss = BatchLoss(config, learner, None)
        seconds, speeds = [], []
        for step in range(WARM_UP + settings["steps"]):
            batch = _random_batch(step, length, samples, SHAPES[settings["size"]]["vocab_size"])
            _wait_for(ranks.device)
            started = time.perf_counter()
            record = loss.backward(batch, batch.samples)
            update = learner.update(record["loss"], tokens=samples * length, samples=samples)
            _wait_for(ranks.device)
            seconds.append(time.perf_counter() - started)
            speeds.append(learner.speed(samples * length, seconds[-1]))
            if not update.applied:
                raise RuntimeError(f"step {step}: loss {record['loss']}, gradient norm {update.grad_norm}")
        median = statistics.median(seconds[WARM_UP:])
        measured = speeds[WARM_UP:]
        speed = {name: statistics.median(s[name] for s in measured) for name in measured[0]}
        peak = speed["peak_memory_gib"]
        if ranks.device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(ranks.device) / 2**30
    return {
        "tokens_per_second": speed["tokens_per_second"],
        "gflops_per_second": speed["gflops_per_second"],
        "mfu": speed.get("mfu"),
        "peak_gib": peak,
        "flash": learner.policy.flash,
        "step_seconds": median,
        "first_step_seconds": seconds[0],
    }


def _trainer_config(settings: Settings) -> Settings:
    model: Settings = {"name": settings["model"], "device": settings["device"], "ac": {}}
    if settings["lora"]:
        model["experimental"] = {"lora": {"rank": 16}}
    if settings["compile"]:
        model["compile"] = {}
    return {
        "model": model,
        "optim": {"lr": 1e-6},
        "seq_len": settings["length"],
        "output_dir": settings["folder"],
        "log": {"level": "warning"},
    }


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


def decode(settings: Settings) -> Figures:
    """The embedded engine by itself: `concurrency` sequences of `new_tokens` tokens at the same time."""
    import torch

    from buckeye.config.inference import InferenceConfig
    from buckeye.inference.server.server import load_engine

    concurrency, new_tokens = settings["concurrency"], settings["new_tokens"]
    directory, device = Path(settings["model"]), torch.device(settings["device"])
    max_len = PROMPT_TOKENS + new_tokens
    config = InferenceConfig.model_validate(
        {
            "model": {"name": str(directory), "device": settings["device"], "max_model_len": max_len},
            "max_num_seqs": concurrency,
            "kv_cache_gb": _cache_gb(directory, device, concurrency, max_len),
        }
    )
    engine = load_engine(config, directory)
    _generate(engine, concurrency, min(8, new_tokens))
    _wait_for(device)
    started = time.perf_counter()
    tokens = _generate(engine, concurrency, new_tokens)
    seconds = time.perf_counter() - started
    slots = engine.decoder.cache.slots
    return {
        "tokens_per_second": tokens / seconds,
        "step_ms": 1000 * seconds / (new_tokens * math.ceil(concurrency / slots)),
        "slots": slots,
        "dtype": str(engine.decoder.cache.kv.dtype).removeprefix("torch."),
        "peak_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
    }


def _cache_gb(directory: Path, device: Any, concurrency: int, max_len: int) -> float:
    """Room for all sequences, or as many as fit."""
    import psutil
    import torch

    from buckeye.inference.engine.architecture import read_spec
    from buckeye.inference.engine.kv_cache import slot_bytes
    from buckeye.inference.engine.weights import Checkpoint, auto_dtype

    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    dtype = auto_dtype(Checkpoint(directory), device)
    wanted = concurrency * slot_bytes(read_spec(directory), max_len, dtype)
    return min(wanted, _CACHE_SHARE * free) / 1e9


def _generate(engine: Any, count: int, new_tokens: int) -> int:
    """Sample to the end; returns how many tokens that were."""
    import random

    from buckeye.inference.engine.sequences import Sequence
    from buckeye.inference.types import SamplingParams

    draw = random.Random(count)
    vocab = engine.decoder.spec.vocab_size
    sequences = [
        Sequence(
            tuple(draw.randrange(vocab) for _ in range(PROMPT_TOKENS)),
            SamplingParams(max_tokens=new_tokens, seed=seed),
        )
        for seed in range(count)
    ]
    engine.submit(sequences)
    while engine.step():
        pass
    for sequence in sequences:
        if sequence.error is not None or len(sequence.token_ids) != new_tokens:
            raise RuntimeError(f"a sequence ended after {len(sequence.token_ids)} tokens: {sequence.error}")
    return count * new_tokens


def reinforce(settings: Settings) -> Figures:
    """A run of the `rl` launcher; all figures are medians over its steps but the first."""
    folder = Path(settings["folder"])
    config = folder / "rl.json"
    config.write_text(json.dumps(_run_config(settings, folder / "run")), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "buckeye", "rl", "@", str(config)], check=True)
    return _read_run(folder / "run" / "metrics.jsonl") | _devices(settings)


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
            "model": {"device": settings["device"]},
            "optim": {"lr": 3e-6},
            "seq_len": 4 * settings["length"],  # a row of several rollouts keeps a GPU busier than one of one
        },
        "orchestrator": {
            "batch_size": settings["batch"],
            "rollouts_per_example": settings["group"],
            "seq_len": settings["length"],
            "sampling": {"max_tokens": settings["length"]},
            "env": [{"id": str(HERE / "letters.py"), "args": {"task": "emit"}}],
        },
        "inference": inference,
    }


def _devices(settings: Settings) -> Settings:
    """Which GPUs a run takes: two if there are two; of a single one the engine gets less than half."""
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
        "inference_share": 0.37 if first == last else 0.8,
        "gpu_gb": round(int(mebibytes) * 2**20 / 1e9, 1),
    }


def _read_run(metrics: Path) -> Figures:
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
    return {
        "step_seconds": seconds,
        "tokens_per_second": median("tokens") / seconds,
        "samples": median("samples"),
        "tokens": median("tokens"),
        **{f"{cause}_seconds": median(f"time/{cause}") for cause in ("wait", "compute", "publish")},
        "mismatch_kl": median("mismatch_kl"),
        "peak_gib": median("peak_memory_gib"),
        "steps": len(steps),
    }


MEASURES = {"model": write_model, "trainer": train, "engine": decode, "rl": reinforce}


def main() -> None:
    """Measure one case; the figures go to a file."""
    part, settings, result = sys.argv[1:]
    die_with_parent()
    logging.basicConfig(level=logging.WARNING)
    figures = MEASURES[part](json.loads(Path(settings).read_text(encoding="utf-8")))
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
