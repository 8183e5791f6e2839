"""Settings of the inference server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from buckeye.config.shared import (
    BaseConfig,
    Conflicts,
    LogConfig,
    ModelName,
    Port,
    Quantization,
    UserPath,
    conflict,
)


class ServerConfig(BaseConfig):
    """Address of the server, and the clients it accepts."""

    host: str | None = None
    """Address to listen on. None: 127.0.0.1. Any other address requires a key."""
    port: Port = 8000
    """Port to listen on."""
    api_key_var: str = "BUCKEYE_INFERENCE_KEY"
    """Environment variable with the key that clients must send. If it is unset, a key is generated."""
    allowed_hosts: list[str] = []
    """Additional host names that clients may use (`Host` header), for example behind a proxy."""
    allowed_origins: list[str] = []
    """Origins of web pages that may use the server, such as `http://localhost:3000`."""


class ServedModelConfig(BaseConfig):
    """Model to serve."""

    name: ModelName = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: a GPU if available."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the computation. auto: bfloat16 on a GPU; on a CPU float32 up to 5 million parameters,
    above that bfloat16 if the processor has instructions for it."""
    quantization: Quantization | None = None
    """Round the linear layers like a trainer with this setting (embedded engine). They are not smaller in
    memory."""
    max_model_len: PositiveInt | None = None
    """Maximum length of a sequence, in tokens. None: the limit of the model."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    trust_remote_code: bool = False
    """Run Python code from the folder of the model (vLLM)."""
    enable_auto_tool_choice: bool = False
    """Parse tool calls in replies."""
    tool_call_parser: str = "hermes"
    """Parser of tool calls (vLLM)."""


class ParallelConfig(BaseConfig):
    """Distribution of the server over devices."""

    tp: PositiveInt = 1
    """Number of devices for one replica of the model (tensor parallelism)."""
    dp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of replicas, each with its own server (data parallelism)."""
    pp: PositiveInt = 1
    """Number of nodes for one replica, each with tp devices (pipeline parallelism; vLLM in a Ray cluster)."""


class InferenceConfig(BaseConfig):
    """Inference server of the model, for the orchestrator and any OpenAI client."""

    server: ServerConfig = ServerConfig()
    """Address and access of the server."""
    model: ServedModelConfig = ServedModelConfig()
    """The model to serve."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution over devices."""
    backend: Literal["auto", "torch", "vllm"] = "auto"
    """Inference engine: the embedded one (torch) or vLLM. auto: vLLM on a GPU if installed, else torch."""
    max_num_seqs: PositiveInt = 128
    """Maximum number of sequences generated at a time."""
    kv_cache_gb: PositiveFloat | None = None
    """Memory of the KV cache in GB. None on a GPU: the part of gpu_memory_utilization that the weights do not
    use. None on a CPU: a quarter of the RAM (vLLM: 1 GB)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of the GPU memory for the engine. The default is 0.4 if the trainer uses the same GPU."""
    seed: int | None = None
    """Seed of requests without a seed."""
    max_lora_rank: PositiveInt | None = None
    """Maximum rank of LoRA adapters in vLLM. None: no adapters. The embedded engine has no limit. A run that
    trains adapters sets this value to their rank."""
    weights_dir: UserPath | None = None
    """Load new weights and adapters only from this folder. None: output_dir."""
    no_key: bool = False
    """Accept requests without a key, on loopback only. Routes that control the server are then off."""
    vllm: dict[str, Any] = {}
    """Additional vLLM arguments, by vLLM's names: `max_num_batched_tokens = 8192`."""
    vllm_python: UserPath | None = None
    """Python interpreter with vLLM. None: the current one, or the interpreter of `buckeye vllm install`."""
    log: LogConfig = LogConfig()
    """Logging."""
    output_dir: UserPath = Path("outputs")
    """Directory of logs."""

    def warnings(self) -> Iterator[str]:
        if self.backend == "vllm":
            return
        if self.model.tool_call_parser != ServedModelConfig.model_fields["tool_call_parser"].default:
            yield (
                "`model.tool_call_parser` has no effect in the embedded engine, which uses the chat template "
                "of the model"
            )
        if self.model.trust_remote_code:
            yield (
                "`model.trust_remote_code` has no effect in the embedded engine, which runs no code from the "
                "folder of a model"
            )

    def conflicts(self) -> Conflicts:
        needs = {"vllm": self.vllm, "parallel.tp": self.parallel.tp > 1, "parallel.pp": self.parallel.pp > 1}
        for name in (name for name, is_used in needs.items() if is_used and self.backend != "vllm"):
            yield conflict(
                f"`{name}` requires vLLM: the embedded engine uses one device per replica",
                hint=f'set `inference.backend = "vllm"`, or leave `{name}` out',
            )
        if self.model.quantization is not None and self.backend == "vllm":
            yield conflict(
                "vLLM does not round weights as the trainer does with `model.quantization`",
                "model.quantization",
                hint='set `inference.backend = "torch"`, or name a model folder with weights in 4 bits',
            )
