"""Comparison of a device with a CPU in float32.

Compares the trainer's log-probs, loss and gradient; the engine's log-probs of its samples with the trainer's;
and the weights that the engine loads from the trainer.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_model import SHAPES, make_model

Settings = dict[str, Any]
Report = Callable[[str, dict[str, Any]], None]

# (figure, side of the limit, limit) of each row
LIMITS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "float32": (
        ("logprob_error", "below", 1e-3),
        ("loss_error", "below", 1e-4),
        ("gradient_error", "below", 1e-3),
    ),
    "bfloat16": (("mean_logprob_error", "below", 0.02), ("gradient_cosine", "above", 0.99)),
    "sampler/float32": (("logprob_error", "below", 1e-3),),
    "sampler/auto": (("mean_logprob_error", "below", 0.02), ("kl", "below", 1e-3)),
    "sync": (("different_tensors", "below", 1), ("mean_logprob_error", "below", 0.02)),
}


def measure(settings: Settings, report: Report) -> None:
    """Measure every row of `LIMITS`. Raise RuntimeError if a figure is beyond its limit."""
    import torch

    device, folder = torch.device(settings["device"]), Path(settings["folder"])
    small = folder / "small_model"
    make_model(small, "small", device=torch.device("cpu"), dtype="float32")
    reference = _gradient(small, torch.device("cpu"), "float32")
    beyond: list[str] = []

    def check(row: str, figures: dict[str, Any]) -> None:
        report(row, figures)
        for name, side, limit in LIMITS[row]:
            if not (figures[name] < limit if side == "below" else figures[name] > limit):
                beyond.append(f"{row}: {name} is {figures[name]:.3g}, not {side} {limit:g}")

    check("float32", _compared(_gradient(small, device, "float32"), reference))
    check("bfloat16", _compared(_gradient(small, device, "bfloat16"), reference))
    check("sampler/float32", _Pair(small, "small", device, "float32").compare())
    pair = _Pair(Path(settings["model"]), settings["size"], device, "auto")
    check("sampler/auto", pair.compare())
    check("sync", pair.update(folder / "weights"))
    if beyond:
        raise RuntimeError("; ".join(beyond))


def _gradient(directory: Path, device: Any, dtype: Any) -> dict[str, Any]:
    """Return log-probs, loss and gradient of a packed row with shared prefixes, on the CPU in float64."""
    import numpy as np
    import torch

    from buckeye.trainer.data.packing import pack_micro_batch
    from buckeye.trainer.model.policy import load_policy

    policy = load_policy(str(directory), device, flash=True, compute_dtype=dtype)
    draw = np.random.default_rng(0)
    vocab = SHAPES["small"]["vocab_size"]
    samples = []
    for prompt, answers in ((40, 4), (150, 3), (3, 1), (700, 1)):
        prefix = draw.integers(0, vocab, prompt)
        for _ in range(answers):
            answer = draw.integers(0, vocab, int(draw.integers(5, 200)))
            samples.append((np.concatenate([prefix, answer]).astype(np.int32), prompt))
    masks = [np.arange(len(ids)) >= prompt for ids, prompt in samples]
    row = pack_micro_batch([ids for ids, _ in samples], masks, device)
    temperatures = torch.linspace(0.7, 1.3, len(samples), device=device)[row.sequences]
    advantages = torch.linspace(-1.0, 1.0, len(samples), device=device)[row.sequences]
    with policy.cast_weights():
        logprobs, entropies = policy(row, temperatures)
        loss = -(logprobs * advantages).mean() + 0.01 * entropies.mean()
        loss.backward()
    return {
        "flash": policy.flash,
        "logprobs": logprobs.detach().double().cpu(),
        "loss": float(loss.detach()),
        "gradient": {n: p.grad.double().cpu() for n, p in policy.trainable.items() if p.grad is not None},
    }


def _compared(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    import torch

    if found["gradient"].keys() != reference["gradient"].keys():
        raise RuntimeError("not the same parameters have a gradient")
    difference = (found["logprobs"] - reference["logprobs"]).abs()
    ours, theirs = (
        torch.cat([side["gradient"][name].flatten() for name in reference["gradient"]])
        for side in (found, reference)
    )
    return {
        "flash": found["flash"],
        "logprob_error": float(difference.max()),
        "mean_logprob_error": float(difference.mean()),
        "loss_error": abs(found["loss"] - reference["loss"]) / abs(reference["loss"]),
        "gradient_error": float((ours - theirs).norm() / theirs.norm()),
        "gradient_cosine": float(ours @ theirs / ours.norm() / theirs.norm()),
    }


class _Pair:
    """Engine and trainer of one model on one device."""

    def __init__(self, directory: Path, size: str, device: Any, dtype: str) -> None:
        from buckeye.config.inference import InferenceConfig
        from buckeye.inference.server.server import load_engine
        from buckeye.trainer.model.policy import load_policy

        model = {"name": str(directory), "device": device.type, "dtype": dtype, "max_model_len": 256}
        config = InferenceConfig.model_validate({"model": model, "max_num_seqs": 24, "kv_cache_gb": 2})
        self.directory, self.vocab = directory, SHAPES[size]["vocab_size"]
        self.engine = load_engine(config, directory)
        self.policy = load_policy(str(directory), device, flash=True, compute_dtype=dtype)  # type: ignore[arg-type]

    def compare(self) -> dict[str, Any]:
        """Sample, and compute the log-probs of the samples with the trainer's model."""
        import numpy as np
        import torch

        from buckeye.inference.engine.sequences import Sequence
        from buckeye.inference.types import SamplingParams
        from buckeye.trainer.data.packing import pack_micro_batch

        draw = random.Random(0)
        prompts = [tuple(draw.randrange(self.vocab) for _ in range(length)) for length in (1, 20, 90)]
        sequences = [Sequence(prompts[i // 8], SamplingParams(max_tokens=60 + i, seed=i)) for i in range(24)]
        self.engine.submit(sequences)
        while self.engine.step():
            pass
        ids = [np.array([*s.prompt_ids, *s.token_ids], np.int32) for s in sequences]
        masks = [np.arange(len(i)) >= len(s.prompt_ids) for i, s in zip(ids, sequences, strict=True)]
        row = pack_micro_batch(ids, masks, self.policy.device)
        with torch.no_grad(), self.policy.cast_weights():
            trained, _ = self.policy(row, torch.ones(len(row.targets), device=row.targets.device))
        sampled = torch.tensor([p for s in sequences for p in s.logprobs], dtype=torch.float64)
        log_ratio = trained.double().cpu() - sampled
        return {
            "tokens": len(sampled),
            "logprob_error": float(log_ratio.abs().max()),
            "mean_logprob_error": float(log_ratio.abs().mean()),
            "kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
        }

    def update(self, root: Path) -> dict[str, Any]:
        """Change the trainer's weights, publish them, and let the engine load them."""
        import torch

        from buckeye.base.process import RunIdentity
        from buckeye.base.storage import sync_tree
        from buckeye.inference.engine.weights import Checkpoint
        from buckeye.trainer.output.hf_directory import read_tokenizer_files, save_model
        from buckeye.trainer.parallel.fsdp import gather_tensors
        from buckeye.transport.weights import publish_weights, verify_weights

        weights, dtype = self.engine.decoder.weights, self.engine.decoder.cache.kv.dtype
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
        tokenizer = read_tokenizer_files(str(self.directory))
        marks = [time.perf_counter()]
        tensors = gather_tensors(self.policy.model.state_dict(keep_vars=True), keep=True, dtype=dtype)
        marks.append(time.perf_counter())

        def save(to: Path) -> None:
            save_model(self.policy.model, tokenizer, to, dtype=dtype, tensors=tensors)
            marks.append(time.perf_counter())

        published = publish_weights(
            root,
            1,
            save,
            identity=RunIdentity(run_id="benchmark", attempt=1),
            dtype=str(dtype).removeprefix("torch."),
            durable=False,
        )
        marks.append(time.perf_counter())
        sync_tree(published)
        marks.append(time.perf_counter())
        manifest = verify_weights(published)
        marks.append(time.perf_counter())
        prepared = weights.prepare(Checkpoint(published))
        marks.append(time.perf_counter())
        installed = self.engine.install_weights(prepared, 1)
        while not installed.done():
            self.engine.step()
        marks.append(time.perf_counter())
        own = {"embed": weights.current.embed, "norm": weights.current.final_norm}
        theirs = {
            "embed": self.policy.model.get_input_embeddings().weight,
            "norm": self.policy.model.base_model.norm.weight,
        }
        different = [name for name in own if not torch.equal(own[name], theirs[name].to(dtype))]
        seconds = [after - before for before, after in itertools.pairwise(marks)]
        return {
            "checksum": manifest.checksum[:16],
            "different_tensors": len(different),
            **dict(
                zip(
                    ("gather_s", "save_s", "hash_s", "flush_s", "verify_s", "prepare_s", "install_s"),
                    seconds,
                    strict=True,
                )
            ),
            **self.compare(),
        }


def lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return every figure with its limit, as rows of a Markdown table."""
    found = []
    for row, figures in rows.items():
        limits = {name: f"{'<' if side == 'below' else '>'} {limit:g}" for name, side, limit in LIMITS[row]}
        for name, value in figures.items():
            shown = f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
            found.append(f"| {row} | {name} | {shown} | {limits.get(name, '')} |")
    return found
