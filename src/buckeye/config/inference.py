"""Settings of the inference server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from buckeye.config.shared import BaseConfig, LogConfig, Port, conflict


class ServerConfig(BaseConfig):
    """Address of the server, and the clients it accepts."""

    host: str | None = None
    """The address; None is 127.0.0.1. Any other needs a key."""
    port: Port = 8000
    """The port."""
    api_key_var: str = "BUCKEYE_INFERENCE_KEY"
    """The environment variable that holds the key which clients must send; one is made where it is unset."""
    allowed_hosts: list[str] = []
    """Further names that clients reach it by (the `Host` of their requests), as behind a proxy."""
    allowed_origins: list[str] = []
    """Web pages that may use it, as `http://localhost:3000`."""


class ServedModelConfig(BaseConfig):
    """Model to serve."""

    name: str = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What it computes in; auto is bfloat16 on a GPU, and float32 on a CPU up to 5 million parameters
    (above that bfloat16 where the processor has instructions for it)."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; None is the model's."""
    enforce_eager: bool = False
    """Use no CUDA graphs."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    enable_auto_tool_choice: bool = False
    """Parse tool calls out of replies."""
    tool_call_parser: str = "hermes"
    """How they are written."""


class ParallelConfig(BaseConfig):
    """Distribution of the server over devices."""

    tp: PositiveInt = 1
    """Devices that share one copy of the model."""
    dp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies of the model, each a server of its own."""
    pp: PositiveInt = 1
    """Nodes that share one copy of the model, each with tp devices of it: vLLM, in a Ray cluster."""


class InferenceConfig(BaseConfig):
    """Inference server of the model, for the orchestrator and any OpenAI client."""

    server: ServerConfig = ServerConfig()
    """Where the server listens."""
    model: ServedModelConfig = ServedModelConfig()
    """The model to serve."""
    parallel: ParallelConfig = ParallelConfig()
    """How the server is spread over devices."""
    backend: Literal["auto", "torch", "vllm"] = "auto"
    """The engine: the embedded one (torch) or vLLM; auto is vLLM on a GPU if it is installed, else torch."""
    max_num_seqs: PositiveInt = 128
    """Most sequences that are generated at a time."""
    kv_cache_gb: PositiveFloat | None = None
    """Memory for keys and values in GB; None is what gpu_memory_utilization leaves on a GPU, and on a CPU a
    quarter of the RAM, for vLLM 1 GB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that the engine takes; 0.4 by default where the trainer uses the GPU too."""
    seed: int | None = None
    """Seed of requests that bring none."""
    max_lora_rank: PositiveInt | None = None
    """Largest rank of LoRA adapters that vLLM has room for; None is none. The embedded engine takes any. A
    run that trains adapters sets it."""
    weights_dir: Path | None = None
    """New weights and adapters are taken from below this folder only; None is output_dir."""
    no_key: bool = False
    """Ask for no key, on loopback; the routes that steer the server are closed then."""
    vllm: dict[str, Any] = {}
    """Further arguments for vLLM, by its own names: `max_num_batched_tokens = 8192`."""
    vllm_python: Path | None = None
    """A Python that has vLLM; None looks here and in the environment of `buckeye vllm install`."""
    log: LogConfig = LogConfig()
    """What is logged."""
    output_dir: Path = Path("outputs")
    """Where logs are written."""

    def warnings(self) -> Iterator[tuple[str, str]]:
        if self.backend == "vllm":
            return
        if self.model.tool_call_parser != ServedModelConfig.model_fields["tool_call_parser"].default:
            yield (
                "model.tool_call_parser",
                "is vLLM's: the embedded engine reads tool calls as the model's chat template writes them.",
            )
        if self.model.trust_remote_code:
            yield (
                "model.trust_remote_code",
                "no code that comes with a model is run; it must be of the Qwen3 or Llama family.",
            )

    @model_validator(mode="after")
    def _engine_has_settings(self) -> InferenceConfig:
        if self.backend == "vllm":
            return self
        if self.vllm:
            raise conflict('only vLLM understands these: set inference.backend = "vllm"', "vllm")
        if self.parallel.tp > 1:
            raise conflict(
                "the embedded engine uses one device: set tp to 1 and dp to the number of devices (or use "
                "vLLM)",
                "parallel.tp",
            )
        if self.parallel.pp > 1:
            raise conflict(
                'only vLLM spreads a model over several nodes: set inference.backend = "vllm"', "parallel.pp"
            )
        return self
