"""In-process contenders of the inference benchmark.

They are transformers' `generate`, its continuous batching, and a bare decode loop. benchmarks/inference.py
starts each as

    python benchmarks/inference_rivals.py generate|continuous|bare MODEL DTYPE THREADS

which then answers each line {"prompts": [[ids]], "concurrency": C} with {"tokens": N, "seconds": S}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from inference_load import NEW_TOKENS, PROMPT_TOKENS

from buckeye.base.process import die_with_parent

Prompts = list[list[int]]
_LENGTH_BUCKET = 64
_BLOCK = 64
_PAGE = 16


def make_generate(model: Any) -> Callable[[Prompts, int], int]:
    """Return a function that runs `generate` on batches in sequence; log-probs come from its logits."""

    def run(prompts: Prompts, concurrency: int) -> int:
        for start in range(0, len(prompts), concurrency):
            ids = torch.tensor(prompts[start : start + concurrency])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            new = made.sequences[:, PROMPT_TOKENS:]
            for step, logits in enumerate(made.logits):
                logits.float().log_softmax(-1).gather(1, new[:, step, None])
        return len(prompts) * NEW_TOKENS

    return run


def make_continuous(model: Any) -> Callable[[Prompts, int], int]:
    """Return a function that keeps a continuous-batching manager busy with `concurrency` requests."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.set_attn_implementation("sdpa")
    pages = -(-(PROMPT_TOKENS + NEW_TOKENS) // _PAGE) + 1
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=130 * pages,
            max_batch_tokens=1024,
            use_cuda_graph=False,
            return_logprobs=True,
            allow_block_sharing=False,
        ),
    )
    manager.start()

    def run(prompts: Prompts, concurrency: int) -> int:
        waiting = list(prompts)
        for _ in range(min(concurrency, len(waiting))):
            manager.add_request(waiting.pop(), max_new_tokens=NEW_TOKENS)
        tokens = finished = 0
        while finished < len(prompts):
            result = manager.get_result(timeout=120)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching gave no result: {result and result.error}")
            if not result.is_finished():
                continue
            finished += 1
            tokens += len(result.generated_tokens)
            if waiting:
                manager.add_request(waiting.pop(), max_new_tokens=NEW_TOKENS)
        return tokens

    return run


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 128)


def _linear(x: torch.Tensor, packed: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


class BareDecoder:
    """Qwen3 or Llama model on preallocated tensors, written for speed only: the limit for an engine.

    Prompts have one length. It has neither admission nor end tokens nor request handling.
    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file

        config = json.loads((directory / "config.json").read_text())
        t = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        angles = (
            torch.arange(PROMPT_TOKENS + NEW_TOKENS)
            .float()
            .outer(theta ** -(torch.arange(0, self.dim, 2).float() / self.dim))
        )
        self.cos = torch.cat([angles.cos()] * 2, -1).to(dtype)[:, None]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)[:, None]
        self.embed, self.norm = t["model.embed_tokens.weight"], t["model.norm.weight"]
        self.head = _pack(self.embed if config["tie_word_embeddings"] else t["lm_head.weight"])
        self.layers = [self._layer(t, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        self.cache: list[torch.Tensor] = []

    def _layer(self, t: dict[str, torch.Tensor], at: str) -> dict[str, torch.Tensor | None]:
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        q_norm = t.get(f"{attention}q_norm.weight")
        return {
            "qkv": _pack(torch.cat([t[f"{attention}{name}_proj.weight"] for name in "qkv"])),
            "out": _pack(t[f"{attention}o_proj.weight"]),
            "gate_up": _pack(torch.cat([t[f"{mlp}gate_proj.weight"], t[f"{mlp}up_proj.weight"]])),
            "down": _pack(t[f"{mlp}down_proj.weight"]),
            "norm1": t[f"{at}input_layernorm.weight"],
            "norm2": t[f"{at}post_attention_layernorm.weight"],
            "qk_norm": None
            if q_norm is None
            else torch.cat(
                [q_norm.expand(self.heads, -1), t[f"{attention}k_norm.weight"].expand(self.kv_heads, -1)]
            ),
        }

    def run(self, prompts: Prompts, concurrency: int) -> int:
        """Sample NEW_TOKENS for each prompt, `concurrency` prompts at a time."""
        for start in range(0, len(prompts), concurrency):
            ids = torch.tensor(prompts[start : start + concurrency])
            count, end = len(ids), PROMPT_TOKENS + NEW_TOKENS
            shape = (count, 2 * self.kv_heads, -(-end // _LENGTH_BUCKET) * _LENGTH_BUCKET, self.dim)
            if not self.cache or self.cache[0].shape != shape:
                self.cache = [torch.zeros(shape, dtype=self.embed.dtype) for _ in self.layers]
            random = torch.rand(NEW_TOKENS, count, 1)
            tokens = self._step(ids, 0, random[0])
            for step in range(1, NEW_TOKENS):
                tokens = self._step(tokens, PROMPT_TOKENS + step - 1, random[step])
        return len(prompts) * NEW_TOKENS

    def _step(self, ids: torch.Tensor, position: int, random: torch.Tensor) -> torch.Tensor:
        """Run tokens [B, T] from `position` on; return the next one, [B, 1]."""
        count, length = ids.shape
        end = position + length
        seen = -(-end // _LENGTH_BUCKET) * _LENGTH_BUCKET
        cos, sin = self.cos[position:end], self.sin[position:end]
        mask = torch.full((length, seen), float("-inf"), dtype=self.embed.dtype).triu(position + 1)
        x = F.embedding(ids, self.embed)
        for w, kv in zip(self.layers, self.cache, strict=True):
            qkv = _linear(self._rms(x, w["norm1"]), w["qkv"]).view(count, length, -1, self.dim)
            qk = qkv[:, :, : self.heads + self.kv_heads]
            if w["qk_norm"] is not None:
                qk = F.rms_norm(qk, (self.dim,), None, self.eps) * w["qk_norm"]
            qk = qk * cos + torch.cat(qk.chunk(2, -1)[::-1], -1) * sin
            keys_values = torch.cat([qk[:, :, self.heads :], qkv[:, :, self.heads + self.kv_heads :]], 2)
            kv[:, :, position:end] = keys_values.transpose(1, 2)
            keys, values = kv[:, :, :seen].chunk(2, 1)
            if length == 1:  # the queries of a group as rows of one product
                query = qk[:, 0, : self.heads].view(count, self.kv_heads, -1, self.dim)
                attended = F.scaled_dot_product_attention(query, keys, values, mask)
            else:
                query = qk[:, :, : self.heads].transpose(1, 2)
                attended = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
                attended = attended.transpose(1, 2)
            x = x + _linear(attended.reshape(count, length, -1), w["out"])
            gate, up = _linear(self._rms(x, w["norm2"]), w["gate_up"]).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, w["down"])
        return self._sample(_linear(self._rms(x[:, -1], self.norm), self.head).float(), random)

    def _sample(self, logits: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        blocks = weights.view(len(weights), -1, _BLOCK)
        ends = blocks.sum(-1).cumsum(-1)
        goal = random * ends[:, -1:]
        block = torch.searchsorted(ends, goal).clamp_(max=ends.shape[1] - 1)
        inner = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1)
        rest = goal - ends.gather(1, block) + inner[:, -1:]
        tokens = block * _BLOCK + torch.searchsorted(inner, rest).clamp_(max=_BLOCK - 1)
        (weights.gather(1, tokens) / ends[:, -1:]).log_()  # the log-probs, which an engine must compute
        return tokens

    def _rms(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def main() -> None:
    """Load the model, report that it is ready, and answer until the input ends."""
    die_with_parent()
    kind, directory, dtype_name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    dtype = getattr(torch, dtype_name)
    if kind == "bare":
        run = BareDecoder(Path(directory), dtype).run
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        run = {"generate": make_generate, "continuous": make_continuous}[kind](model)
    with torch.inference_mode():
        run([[1] * PROMPT_TOKENS], 1)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            started = time.perf_counter()
            tokens = run(asked["prompts"], asked["concurrency"])
            answer = {"tokens": tokens, "seconds": time.perf_counter() - started}
            print(json.dumps(answer), flush=True)
    os._exit(0)  # the thread of the continuous-batching manager would keep the process alive


if __name__ == "__main__":
    main()
