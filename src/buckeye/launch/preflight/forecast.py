"""Forecast of a trainer: peak memory of a rank, and the time of a step.

Memory is the sum of the tensors that exist at the same time. Time is the sum of the work of each kind,
divided by the speed that the device reaches for it. benchmarks/forecast.py compares both with measured
trainings and fits the constants. docs/how-to/check-a-run.md has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from buckeye.base.gpu_speeds import GpuSpeed
from buckeye.launch.preflight.model_shape import ModelShape

TRAINED_BYTES = 16  # per trained parameter: weights, gradients and AdamW's two moments in float32
MEMORY_RANGE, TIME_RANGE = 1.1, 1.3
"""Factors between a forecast and the ends of its range."""

# Values "as in FILE" must equal the constants in that file.
_HEAD_CHUNK, _HEAD_CHUNK_ON_GPU = 128 * 2**20, 512 * 2**20  # bytes of logits, as in trainer/model/logprobs.py
_HEAD_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Fitted costs of the work of a step (`step_work`).

    - `matmul`, `grouped` (products of experts), `attention`: time relative to the time at the peak FLOP/s
    - `activations`, `routing`: reads and writes, per forward pass, of each activation, and of each copy of a
      token for an expert if the GPU lacks a fast kernel
    - `adapter`: seconds per adapted matrix and token
    - `optimizer`: time relative to the time at the bandwidth of the memory
    - `published`: seconds per byte
    - `launches`: seconds of the host per forward pass of a layer; adapters multiply it by `adapter_launches`
    """

    matmul: float
    grouped: float = 0.0
    attention: float
    activations: float
    routing: float = 0.0
    adapter: float = 0.0
    optimizer: float = 1.0
    published: float
    launches: float
    adapter_launches: float = 1.0


GPU_COSTS = Costs(
    matmul=1.31,
    grouped=6.0,
    attention=1.43,
    activations=13.1,
    routing=500,
    adapter=1.64e-7,
    published=1 / 1.5e9,
    launches=2.2e-3,
    adapter_launches=1.45,
)
CPU_COSTS = Costs(
    matmul=0.58,
    attention=3.9,
    activations=1.9,
    adapter=1e-5,
    optimizer=4.4,
    published=1 / 1.5e9,
    launches=1e-4,
)
_CORE_FLOPS, _WIDE_CORE_FLOPS = 64e9, 128e9  # float32, per second at 2 GHz: with AVX2, with AVX-512
_CPU_BFLOAT16, _EMULATED_BFLOAT16 = 2.5, 0.13  # speed with and without instructions / float32; fitted
_CPU_BANDWIDTH = 8e9
_PUBLISH_SECONDS = 0.03  # for files of any size, measured on a quiet disk


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose, such as weights, with its size in bytes."""

    what: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLoad:
    """Work and memory use of one step of a trainer.

    - `tokens`: tokens of a step of all ranks, in samples of `length`, and in micro-batches of `row`; each
      epoch on the batch counts
    - `updates`: optimizer updates of a step
    - `moments`: bytes of the optimizer state
    - `shards`: parts into which weights, gradients and optimizer state are divided
    - `adapter`: parameters of an adapter, or 0 if all weights are trained; `adapted`: its matrices in a layer
    - `width`: bytes per number of the computation
    - `frozen`: bytes of frozen weights; `dequantized`: bytes of a matrix of them in more than 8 bits
    - `recomputed`: layers with recomputed activations; if `offloaded`, their inputs are in main memory
    - `padded`: attention copies queries, keys and values
    - `ampere_attention`: attention is a kernel for Ampere, such as FlashAttention-2
    - `whole_logits`: bytes per logit of a loss without chunks, or 0
    - `routed_copies`: copies of a token's hidden state per expert, fitted
    - `published`: bytes that a step casts, hashes and writes to publish weights
    """

    shape: ModelShape
    tokens: int
    row: int
    length: int
    updates: int = 1
    optimizer: str = "adamw"
    moments: int
    ranks: int = 1
    shards: int = 1
    adapter: int = 0
    adapted: int = 0
    width: int = 2
    frozen: int = 0
    dequantized: int = 0
    recomputed: int = 0
    offloaded: bool = False
    on_gpu: bool = True
    padded: bool = False
    ampere_attention: bool = True
    whole_logits: float = 0
    routed_copies: float = 12.5
    published: int = 0

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.adapter or self.shape.parameters

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a rank in an update."""
        return max(1, math.ceil(self.tokens / self.updates / self.ranks / self.row))


# --- memory ---


def state_parts(load: TrainerLoad) -> list[Part]:
    """Return the memory that stays in use between steps: weights, gradients, moments of the optimizer.

    On a GPU, the gradients of a single micro-batch use the memory that its activations leave.
    """
    trained, shards = load.trained, load.shards
    gradients = 4 * trained // shards
    if load.on_gpu and load.micro_batches == 1:
        gradients = max(0, gradients - _activations(load).size)
    parts = [
        Part("weights (float32)", 4 * trained // shards),
        Part("gradients (float32)", gradients),
        Part(f"optimizer ({load.optimizer})", load.moments // shards),
    ]
    if load.adapter:
        parts.append(Part("frozen weights", load.frozen // shards))
    return parts


def work_parts(load: TrainerLoad) -> list[Part]:
    """Return the memory that a step needs in addition: cast weights, activations and logits."""
    return [*_casts(load), _activations(load), _logits(load), Part("dequantized matrix", load.dequantized)]


def _casts(load: TrainerLoad) -> list[Part]:
    """Return the memory of weights in the compute dtype, which the trainer casts once per step.

    A sharded model gathers the weights of two layers at a time, and the tensors outside of layers.
    """
    shape = load.shape
    if load.shards > 1:
        return [Part("gathered weights", load.width * (2 * shape.layer + shape.embeddings))]
    if load.width == 4 or load.adapter:
        return []
    return [Part("weights (bfloat16)", 2 * shape.parameters)]


def _activations(load: TrainerLoad) -> Part:
    """Return the activations that are kept, and the memory of the backward pass of one layer."""
    kept = (load.shape.layers - load.recomputed) * _layer_values(load) + 3 * load.shape.hidden
    inputs = 0 if load.offloaded else load.recomputed * load.shape.hidden
    return Part(
        f"activations of {load.row} tokens",
        load.width * (kept + inputs + _temporary_values(load)) * load.row,
    )


def _layer_values(load: TrainerLoad) -> int:
    """Return the number of values that a layer keeps for each token.

    - the input and the output of its two norms (4 hidden)
    - queries before and after their norm, and the attended values (3 queries)
    - keys before and after their norm, and values (3 keys)
    - in the feed-forward part: the gate, its activation, the other factor and the product (4 units)
    - for experts, copies of the hidden state
    - without flash attention: a second copy of queries, keys and values in padded blocks
    - on a GPU, with adapters: more copies of the norms' outputs (3 hidden)
    """
    shape = load.shape
    values = 4 * shape.hidden + 3 * shape.queries + 3 * shape.keys + 4 * shape.units
    values += int(load.routed_copies * shape.active_experts) * shape.hidden
    if load.padded:
        values += 2 * shape.queries + 2 * shape.keys
    return values + (3 * shape.hidden if load.adapter and load.on_gpu else 0)


def _temporary_values(load: TrainerLoad) -> int:
    backward = 3 * load.shape.units + 2 * load.shape.hidden
    return backward + (_layer_values(load) if load.recomputed else 0)


def _logits(load: TrainerLoad) -> Part:
    """Return the memory of logit chunks, and of the gradient of the output projection.

    On a GPU, the backward pass of the layers reuses the memory of the chunks.
    """
    shape = load.shape
    chunk = _HEAD_CHUNK_ON_GPU if load.on_gpu else _HEAD_CHUNK
    tokens = min(load.row, _HEAD_TOKENS, max(1, chunk // (4 * shape.vocabulary)))
    if load.whole_logits:
        logits = int(load.whole_logits * load.row) * shape.vocabulary
    else:
        logits = ((2 if load.on_gpu else 3) * 4 + load.width) * tokens * shape.vocabulary
    if load.on_gpu:
        logits = max(0, logits - load.width * _temporary_values(load) * load.row)
    gradient = 0 if load.adapter else 4 * shape.vocabulary * shape.hidden
    return Part("logits and their gradients", logits + gradient)


def peak_bytes(load: TrainerLoad) -> int:
    """Return the bytes of all tensors of a rank at the peak."""
    return sum(part.size for part in (*state_parts(load), *work_parts(load)))


# --- time ---


def step_work(load: TrainerLoad, speed: GpuSpeed) -> dict[str, float]:
    """Return the work of a step of one rank, by the names of `Costs`.

    A matrix product of the forward pass costs 2 operations per element and token. The backward pass costs
    twice that, or once for a frozen matrix, and recomputation costs one forward pass more. In the forward
    pass, attention costs 2 queries for each token and each earlier token of its sample; the backward pass
    costs 2.5 times that.
    """
    shape, tokens = load.shape, load.tokens / load.ranks
    again = load.recomputed / shape.layers
    products = 2 * tokens * (2 + again + (not load.adapter)) / speed.flops
    pairs = 2 * shape.layers * shape.queries * load.length * tokens * (3.5 + again)
    moved = load.width * tokens * (3 + again) / speed.bandwidth
    values = 4 * shape.hidden + 3 * shape.queries + 3 * shape.keys + 4 * shape.units
    routed = (shape.layers - shape.dense_layers) * shape.active_experts * shape.hidden
    return {
        "matmul": products * shape.matrix_elements,
        "grouped": products * shape.active_expert_elements * speed.grouped,
        "attention": pairs / speed.flops / (speed.ampere_share if load.ampere_attention else 1),
        "activations": moved * shape.layers * values,
        "routing": 0.0 if speed.grouped else moved * routed,
        "adapter": float(shape.layers * load.adapted * tokens),
        "optimizer": load.updates * (12 * load.trained + 2 * load.moments) / load.shards / speed.bandwidth,
    }


def cpu_speed(cores: int, width: int, *, wide: bool, fast_bfloat16: bool) -> GpuSpeed:
    """Return the speed of cores, with AVX-512 if `wide`, for numbers of `width` bytes.

    Without `fast_bfloat16`, torch emulates products in bfloat16.
    """
    flops = cores * (_WIDE_CORE_FLOPS if wide else _CORE_FLOPS)
    if width == 2:
        flops *= _CPU_BFLOAT16 if fast_bfloat16 else _EMULATED_BFLOAT16
    return GpuSpeed(flops, _CPU_BANDWIDTH)


def step_seconds(load: TrainerLoad, speed: GpuSpeed, costs: Costs = GPU_COSTS) -> float:
    """Return the seconds of a step, without the time to publish weights."""
    device = sum(amount * getattr(costs, name) for name, amount in step_work(load, speed).items())
    again = load.recomputed / load.shape.layers
    passes = load.shape.layers * load.updates * load.micro_batches * (3 + 2 * again)
    host = passes * costs.launches * (costs.adapter_launches if load.adapter else 1)
    return max(device, host)


def publish_seconds(load: TrainerLoad, costs: Costs = GPU_COSTS) -> float:
    """Return the seconds to publish the weights of a step."""
    return load.published * costs.published + (_PUBLISH_SECONDS if load.published else 0)
