"""A checkpoint as a model for others: written for transformers, loaded again by transformers, compared."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.checkpoint.merge import complete_model
from buckeye.errors import RunError
from buckeye.trainer.adapter import ADAPTER_DIRECTORY, CONFIG_FILE, merge_adapter
from buckeye.trainer.canary import greedy_canary
from buckeye.trainer.export import read_tokenizer_files, save_model
from buckeye.trainer.model import load_policy
from buckeye.transport.weights import Canary

_TOLERANCE_FLOAT32 = 1e-3
"""Largest difference of a log-prob where all weights are exported as they were trained."""
_TOLERANCE_HALF = 0.2
"""Largest mean difference where they were rounded to 16 bits, which moves log-probs by some hundredths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What loading an exported model has shown. `difference` is between its log-probs of a fixed prompt and
    those of the checkpoint: the largest in float32, else the mean."""

    dtype: str
    difference: float

    def __str__(self) -> str:
        return f"loads with transformers; log-probs differ from the checkpoint's by {self.difference:.1e}"


def write_model(state: Path, out: Path, *, dtype: str | None) -> Verified:
    """Write the model of a checkpoint's trainer part to `out`, as the type `dtype` (None: as trained), and
    verify it. Raises `RunError` if what was written is not the same model."""
    source = complete_model(state)
    policy = load_policy(str(source), torch.device("cpu"), compute_dtype="float32")
    canary = greedy_canary(policy)
    stored = getattr(torch, dtype) if dtype is not None else torch.float32
    save_model(policy.model, read_tokenizer_files(str(source)), out, dtype=stored)
    del policy
    return _verify(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), out, canary)


def write_merged(state: Path, out: Path, *, base: Path) -> Verified:
    """As `write_model`, of a checkpoint that holds an adapter: the model that `base` is with it."""
    adapter = state / ADAPTER_DIRECTORY
    canary = _canary(_adapted(base, adapter))
    merge_adapter(str(base), adapter, out)
    for name, content in read_tokenizer_files(str(adapter)).items():
        (out / name).write_bytes(content)
    return _verify(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), out, canary)


def write_adapter(state: Path, out: Path, *, base: Path, base_name: str) -> Verified:
    """As `write_model`, the adapter alone, in peft's format; `base_name` is what it says to belong to."""
    adapter = state / ADAPTER_DIRECTORY
    canary = _canary(_adapted(base, adapter))
    shutil.copytree(adapter, out, dirs_exist_ok=True)
    content = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = base_name
    (out / CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return _verify(_adapted(base, out), out, canary)


def has_adapter(state: Path) -> bool:
    """Whether a checkpoint's trainer part holds an adapter instead of a model."""
    return (state / ADAPTER_DIRECTORY).is_dir()


def _adapted(base: Path, adapter: Path) -> Any:
    from peft import PeftModel  # takes seconds

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter))


@torch.no_grad()
def _canary(model: Any) -> Canary:
    """As `greedy_canary`, of a model that is not the trainer's."""
    vocabulary = model.config.vocab_size
    prompt = [i * vocabulary // 8 for i in range(8)]
    tokens: list[int] = []
    for _ in range(4):
        tokens.append(int(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
    logprobs = _logprobs(model, prompt, tokens)
    return Canary(dtype="float32", prompt_ids=prompt, token_ids=tokens, logprobs=logprobs)


@torch.no_grad()
def _logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probs of `tokens` after `prompt`."""
    logits = model.eval()(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    every = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def _verify(model: Any, directory: Path, canary: Canary) -> Verified:
    """Raises `RunError` unless the model of a directory says what the canary says, and its tokenizer
    loads."""
    AutoTokenizer.from_pretrained(directory)
    stored = _stored_dtype(directory)
    ours = _logprobs(model, canary.prompt_ids, canary.token_ids)
    differences = [abs(one - other) for one, other in zip(ours, canary.logprobs, strict=True)]
    exact = stored == "float32"
    difference = max(differences) if exact else sum(differences) / len(differences)
    limit = _TOLERANCE_FLOAT32 if exact else _TOLERANCE_HALF
    if not difference <= limit:  # so that a difference that is no number is refused too
        raise RunError(
            "What was exported is not the model of the checkpoint: its log-probs of a fixed prompt differ "
            f"by {difference:.2g} (at most {limit:g} is rounding). Nothing was kept."
        )
    return Verified(dtype=stored, difference=difference)


def _stored_dtype(directory: Path) -> str:
    """What the weights of a directory are stored as; an adapter is always float32."""
    config = directory / "config.json"
    return str(json.loads(config.read_text(encoding="utf-8"))["dtype"]) if config.exists() else "float32"
