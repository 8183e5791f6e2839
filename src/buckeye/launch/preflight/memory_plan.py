"""Estimate the memory that each process of a run needs, from the sizes of the model and the settings.

Most amounts are computed from the shapes of tensors. The memory of the program and of libraries was measured.
docs/how-to/check-a-run.md has the formulas of the largest parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.config.inference import InferenceConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import SGDConfig, TrainerConfig
from buckeye.launch.preflight.devices import Gpu, MainMemory
from buckeye.launch.preflight.forecast import Part, TrainerLoad, state_parts, work_parts
from buckeye.launch.preflight.model_shape import ModelShape

MAIN_MEMORY = "main memory"

# Values "as in FILE" must equal the constants in that file.
_PREFILL_TOKENS = 8192  # as in inference/engine/engine.py
_REPLACED_AT_ONCE = 2**26  # bytes of weights, as in inference/engine/weights.py
_BFLOAT16_PARAMETERS = 5_000_000  # as in inference/engine/dtype.py
_MAIN_MEMORY_SHARE = 0.25  # for keys and values, as in inference/engine/decoder.py
_GPU_RESERVE = 2 * 2**30  # bytes that the engine leaves free on a GPU, as in inference/engine/decoder.py
_MIN_FREE_SHARE = 0.25  # minimum for keys and values, as a share of the free memory
_VLLM_CPU_CACHE = 1_000_000_000
_QUANTIZED = {"4bit": 0.516, "8bit": 1.005}  # bytes per weight, with the scales of blocks or rows
_DEQUANTIZED = {"4bit": 4, "8bit": 12}  # bytes per weight of a matrix: in float32, and copies
_PROCESS = 450_000_000  # an interpreter with torch and transformers, measured
_ENGINE_FRAGMENTATION = 0.1  # fragmentation, as a share of weights and prompts, measured
_ENGINE = 575_000_000  # _PROCESS and the caches of libraries for matrix products, measured
_REUSED_SHARE = 0.25  # checkpoint copies reuse this share of the memory of activations and logits, measured
_FRAGMENTATION = 0.65  # fragmentation, as a share of activations and logits, measured
_ORCHESTRATOR = 110_000_000  # measured with an environment that needs no extra libraries
_TOKENIZER = 800  # bytes per token of the vocabulary, measured
_ROLLOUT_TOKEN = 100  # bytes per token of a rollout: id, log-prob, version and mask, as Python objects
_GPU_PROCESS = 700_000_000  # a CUDA context, its kernels and the workspaces of libraries
_GPU_PROCESS_MAIN = 2_500_000_000  # main memory of a process that uses a GPU
_PUBLISHED = 6  # bytes per weight: cast to bfloat16, hashed and written


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Memory of a process at one location: a GPU ("GPU 0"), or main memory."""

    process: str
    location: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """Sum of all parts in bytes: the maximum memory at any time."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The hardware for a plan, and whether vLLM runs on it.

    Without `gpus`, all processes use main memory only. `fast_bfloat16` is True if the CPU has instructions
    that multiply in bfloat16, on which the dtype "auto" depends.
    """

    memory: MainMemory
    gpus: tuple[Gpu, ...] = ()
    fast_bfloat16: bool = False
    vllm: bool = False


def processor_has(*flags: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this CPU has the instructions of any of the flags."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return any(flag in text for flag in flags)


def plan_memory(config: RLConfig, shape: ModelShape, hardware: Hardware) -> list[ProcessMemory]:
    """Return the memory of every process of a run on this machine, in start order."""
    needs: list[ProcessMemory] = []
    if config.inference is not None and 0 in config.cluster.inference_node_numbers:
        tp = config.inference.parallel.tp
        ids = config.inference_gpu_ids
        for number, first in enumerate(range(0, len(ids), tp)):
            devices = ids[first : first + tp]
            needs += _inference(config, shape, hardware, number, devices)
    tokens = config.orchestrator.max_concurrent_rollouts * config.orchestrator.seq_len
    orchestrator = [
        Part("tokenizer", _TOKENIZER * shape.vocabulary),
        Part("rollouts", _ROLLOUT_TOKEN * tokens),
        Part("program", _ORCHESTRATOR),
    ]
    if (workers := config.orchestrator.workers) > 1:
        program = _TOKENIZER * shape.vocabulary + _ORCHESTRATOR
        orchestrator.append(Part("rollout workers", workers * program))
    needs.append(_process("orchestrator", MAIN_MEMORY, orchestrator))
    ranks = config.trainer_gpu_ids if 0 in config.cluster.trainer_node_numbers else []
    load = trainer_load(config, shape, hardware)
    for number, device in enumerate(ranks):
        needs += _trainer(config.trainer, load, number, device)
    return needs


def _process(process: str, location: str, parts: Sequence[Part]) -> ProcessMemory:
    return ProcessMemory(process=process, location=location, parts=tuple(part for part in parts if part.size))


# --- the trainer ---


def trainer_load(config: RLConfig, shape: ModelShape, hardware: Hardware) -> TrainerLoad:
    """Return the work of a trainer step, with a batch of samples of the maximum length."""
    trainer = config.trainer
    model, on_gpu = trainer.model, bool(hardware.gpus) and trainer.model.device != "cpu"
    width = _width(model.compute_dtype, shape, hardware, on_gpu=on_gpu)
    lora, recomputed = model.experimental.lora, 0
    if model.ac is not None or model.ac_offloading is not None:
        recomputed = shape.layers // (model.ac.freq if model.ac is not None else 1)
    adapter = 0 if lora is None else shape.adapter(lora)
    length, rollouts = min(config.orchestrator.seq_len, trainer.seq_len), config.orchestrator.batch_rollouts
    groups = max(1, rollouts // config.orchestrator.rollouts_per_example)
    updates = trainer.epochs_per_batch * min(trainer.mini_batches, groups)
    conversations = trainer.supervised.batch_size if trainer.supervised is not None else 0
    return TrainerLoad(
        shape=shape,
        tokens=trainer.epochs_per_batch * rollouts * length + updates * conversations * trainer.seq_len,
        row=trainer.seq_len,
        length=length,
        updates=updates,
        optimizer=trainer.optim.type,
        moments=_moments(trainer, shape, adapter or shape.parameters),
        ranks=config.trainer_ranks,
        shards=_shards(trainer, config.trainer_ranks, on_gpu=on_gpu),
        adapter=adapter,
        adapted=0 if lora is None else len(lora.target_modules),
        width=width,
        frozen=0 if lora is None else _frozen(shape, width, model.quantization),
        dequantized=_DEQUANTIZED.get(model.quantization or "", 0) * shape.hidden * shape.mlp,
        recomputed=recomputed,
        offloaded=model.ac_offloading is not None,
        on_gpu=on_gpu,
        padded=not on_gpu or width == 4 or model.attn == "sdpa",
        published=_PUBLISHED * (adapter or shape.parameters),
    )


def _trainer(config: TrainerConfig, load: TrainerLoad, rank: int, device: int) -> list[ProcessMemory]:
    title, state, work = f"trainer {rank}", state_parts(load), work_parts(load)
    loss = config.loss
    if loss.kl_coef and not (load.adapter and config.model.adapter is None and loss.reference_model is None):
        state.append(Part("reference model (float32)", 4 * load.shape.parameters // load.shards))
    saved = _saved(load, rank)
    published = Part("published weights", _published_bytes(config, load) if rank == 0 else 0)
    if not load.on_gpu:
        other = [
            _fragmentation(load, work),
            _rounded(config, load),
            published,
            Part("checkpoint copies", _copies(load, work, saved)),
            Part("program", _PROCESS),
        ]
        return [_process(title, MAIN_MEMORY, [*state, *work, *other])]
    offloaded = config.model.fsdp_cpu_offload
    on_device = [*([] if offloaded else state), *work, Part("program", _GPU_PROCESS)]
    in_main_memory = [
        *(state if offloaded else []),
        published,
        Part("checkpoint copies", saved),
        Part("program", _GPU_PROCESS_MAIN),
    ]
    return [
        _process(title, f"GPU {device}", on_device),
        _process(title, MAIN_MEMORY, in_main_memory),
    ]


def _shards(config: TrainerConfig, ranks: int, *, on_gpu: bool) -> int:
    """Return the number of shards into which the ranks divide the model."""
    model = config.model
    is_forced = model.sharding == "full" or model.tp > 1 or model.dp_replicate > 1
    if is_forced or (model.sharding == "auto" and on_gpu and ranks > 1):
        return model.tp if model.sharding == "none" else max(1, ranks // model.dp_replicate)
    return 1


def _width(dtype: str, shape: ModelShape, hardware: Hardware, *, on_gpu: bool) -> int:
    """Return the bytes per number of the compute dtype."""
    if dtype == "auto":
        is_fast = on_gpu or (hardware.fast_bfloat16 and shape.parameters >= _BFLOAT16_PARAMETERS)
        return 2 if is_fast else 4
    return 4 if dtype == "float32" else 2


def _frozen(shape: ModelShape, width: int, quantization: str | None) -> int:
    """Return the bytes of frozen weights. The embedding and the output projection are not quantized."""
    if quantization is None:
        return width * shape.parameters
    return int(_QUANTIZED[quantization] * (shape.parameters - shape.embeddings)) + width * shape.embeddings


def _moments(config: TrainerConfig, shape: ModelShape, trained: int) -> int:
    optim = config.optim
    if isinstance(optim, SGDConfig):
        return 4 * trained if optim.momentum else 0
    if optim.type == "adamw8bit":
        return 2 * trained
    if optim.type == "muon":  # one moment for the layers' matrices, two for the embeddings
        outer = 0 if config.model.experimental.lora is not None else shape.embeddings
        return 4 * (trained - outer) + 8 * outer
    return 8 * trained


def _fragmentation(load: TrainerLoad, work: Sequence[Part]) -> Part:
    """Return the memory in gaps between allocated blocks, which the allocator cannot use.

    The plan counts gaps for an adapter only. If all weights are trained, moments and checkpoint copies fill
    the gaps.
    """
    size = int(_FRAGMENTATION * sum(part.size for part in work)) if load.adapter else 0
    return Part("fragmentation", size)


def _copies(load: TrainerLoad, work: Sequence[Part], saved: int) -> int:
    """Return the memory of checkpoint copies, without the part that is counted as memory of a step.

    Copies reuse memory of activations and logits, so both together need less than their sum.
    """
    if load.adapter:
        return saved
    return saved - min(saved // 3, int(_REUSED_SHARE * sum(part.size for part in work)))


def _rounded(config: TrainerConfig, load: TrainerLoad) -> Part:
    """Return the memory of rounded weights, which a trainer holds in addition to the exact weights."""
    weights = config.weights
    stored = weights.dtype == "bfloat16" or (weights.dtype == "auto" and load.width == 2)
    rounded = weights.rounding == "stochastic" or (weights.rounding == "auto" and stored)
    is_kept = rounded and load.shards == 1 and not load.adapter
    return Part("rounded weights (float32)", 4 * load.shape.parameters if is_kept else 0)


def _published_bytes(config: TrainerConfig, load: TrainerLoad) -> int:
    """Return the bytes of the copy of the weights that is published in the background."""
    if load.adapter:
        return 4 * load.adapter
    widths = {"auto": load.width, "float32": 4}
    return widths.get(config.weights.dtype, 2) * load.shape.parameters


def _saved(load: TrainerLoad, rank: int) -> int:
    """Return the bytes of the copies in main memory that a rank writes to a checkpoint in the background.

    Rank 0 holds the copies of weights and moments. In a sharded model, each rank holds its own moments.
    """
    weights = 4 * load.trained
    first = weights if rank == 0 else 0
    if load.shards > 1 and not load.adapter:
        return first + load.moments // load.shards
    return weights + load.moments if rank == 0 else 0


# --- inference ---


def _inference(
    config: RLConfig, shape: ModelShape, hardware: Hardware, number: int, devices: Sequence[int]
) -> list[ProcessMemory]:
    title, inference, rollouts = f"inference {number}", config.inference, _rollouts_per_replica(config)
    assert inference is not None
    on_gpu = bool(hardware.gpus) and inference.model.device != "cpu"
    if on_gpu and hardware.vllm:
        return _vllm_on_gpus(title, inference, hardware, devices)
    width = _width(inference.model.dtype, shape, hardware, on_gpu=on_gpu)
    if hardware.vllm:
        cache = int(inference.kv_cache_gb * 1e9) if inference.kv_cache_gb else _VLLM_CPU_CACHE
        parts = [Part("weights", width * shape.parameters), Part("keys and values", cache)]
        return [_process(title, MAIN_MEMORY, [*parts, Part("program", 2 * _PROCESS)])]
    # for a tied output projection, the engine stores a second copy of the embedding with a faster layout
    weights = width * (shape.parameters + (shape.embeddings if shape.tied else 0))
    gpu = next((g for g in hardware.gpus if on_gpu and g.index == devices[0]), None)
    keeps_both = on_gpu or width * shape.parameters <= _REPLACED_AT_ONCE
    parts = [
        Part("weights", weights),
        Part("new weights during an update", weights if keeps_both else 0),
        Part("keys and values", _cache(inference, shape, hardware, width, weights, gpu, rollouts)),
        Part("prompts, attention and logits", _engine_temporary(inference, shape, width, rollouts)),
    ]
    if not on_gpu:
        fragmentation = int(_ENGINE_FRAGMENTATION * (weights + parts[-1].size))
        return [
            _process(
                title, MAIN_MEMORY, [*parts, Part("fragmentation", fragmentation), Part("program", _ENGINE)]
            )
        ]
    return [
        _process(title, f"GPU {devices[0]}", [*parts, Part("program", _GPU_PROCESS)]),
        _process(title, MAIN_MEMORY, [Part("program", _GPU_PROCESS_MAIN)]),
    ]


def _vllm_on_gpus(
    title: str, inference: InferenceConfig, hardware: Hardware, devices: Sequence[int]
) -> list[ProcessMemory]:
    """Return the memory of vLLM, which uses the share `gpu_memory_utilization` of each GPU."""
    share = inference.gpu_memory_utilization
    totals = {gpu.index: gpu.total for gpu in hardware.gpus}
    use = f"vLLM: weights, keys and values (gpu_memory_utilization {share:g})"
    return [
        *(_process(title, f"GPU {d}", [Part(use, int(share * totals.get(d, 0)))]) for d in devices),
        _process(title, MAIN_MEMORY, [Part("program", _GPU_PROCESS_MAIN)]),
    ]


def slot_bytes(shape: ModelShape, length: int, width: int) -> int:
    """Return the bytes of the keys and values of one sequence of `length` tokens."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * length * width


def _cache(
    inference: InferenceConfig,
    shape: ModelShape,
    hardware: Hardware,
    width: int,
    weights: int,
    gpu: Gpu | None,
    rollouts: int,
) -> int:
    """Return the bytes of the key-value cache of the embedded engine.

    On a CPU, only slots that the engine writes count: at most one per concurrent rollout, and one per rollout
    for earlier turns.
    """
    length = min(inference.model.max_model_len or shape.max_positions, shape.max_positions)
    slot = slot_bytes(shape, length, width)
    if inference.kv_cache_gb is not None:
        budget = int(inference.kv_cache_gb * 1e9)
    elif gpu is not None:
        share = int(inference.gpu_memory_utilization * gpu.total) - weights
        logits = 4 * inference.max_num_seqs * shape.vocabulary
        free = gpu.free - _GPU_PROCESS - weights
        budget = min(share, free) - weights - 4 * logits - _GPU_RESERVE
        budget = max(budget, int(_MIN_FREE_SHARE * (free - weights)))
    else:
        budget = int(_MAIN_MEMORY_SHARE * hardware.memory.total)
    slots = min(2 * inference.max_num_seqs, max(1, budget // slot))
    if gpu is None:
        running = min(slots, inference.max_num_seqs)
        slots = min(running, rollouts) + min(slots - running, rollouts)
    return slots * slot


def _rollouts_per_replica(config: RLConfig) -> int:
    """Return the number of concurrent rollouts per replica."""
    assert config.inference is not None
    nodes = len(config.cluster.inference_node_numbers)
    replicas = max(1, nodes * len(config.inference_gpu_ids) // config.inference.parallel.tp)
    return math.ceil(config.orchestrator.max_concurrent_rollouts / replicas)


def _engine_temporary(inference: InferenceConfig, shape: ModelShape, width: int, rollouts: int) -> int:
    """Return the temporary memory of the engine.

    It consists of the activations of prompts in one layer, a copy of the keys and values of one layer for a
    decode step, and copies of the logits while the engine sorts and sums them. For each token, a layer holds:

    - its input, the sum with the attended values, and the norm (3 hidden)
    - queries, keys, values, and the attended values (2 queries, 2 keys)
    - in the feed-forward part: both factors, the activation and the product (4 mlp)
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 3 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.mlp
    length = inference.model.max_model_len or shape.max_positions
    running = min(inference.max_num_seqs, rollouts)
    prompts = width * layer * min(_PREFILL_TOKENS, running * length)
    attended = running * slot_bytes(shape, length, width) // shape.layers
    return prompts + attended + 4 * 4 * running * shape.vocabulary
