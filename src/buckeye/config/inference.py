"""Settings of an inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from buckeye.config.base import BaseConfig
from buckeye.config.shared import (
    DEFAULT_MODEL,
    Device,
    LogConfig,
    PositiveInt,
    SharedWeightBroadcastConfig,
)


class ServerConfig(BaseConfig):
    """Where the server listens."""

    host: str | None = None
    """Address; None is the loopback. Any other address needs a key."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port; `rl` finds a free one unless it is given."""
    api_key_var: str = "BUCKEYE_INFERENCE_KEY"
    """Environment variable that holds the key clients must send."""


class InferenceModelConfig(BaseConfig):
    """The model as it is served."""

    name: str = DEFAULT_MODEL
    """A local model directory or a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision; auto is float32 on a CPU, bfloat16 on a GPU."""
    device: Device = "auto"
    """Where to run; auto takes a GPU where there is one."""
    max_model_len: PositiveInt | None = None
    """Longest context; None is the model's own."""
    enforce_eager: bool = False
    """vLLM: no compiled graphs."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    enable_auto_tool_choice: bool = False
    """vLLM: let the model choose tools."""
    tool_call_parser: str = "hermes"
    """vLLM: how tool calls are written."""


class ParallelConfig(BaseConfig):
    """How many devices a server and its replicas use."""

    tp: PositiveInt = 1
    """Devices of one replica."""
    dp: PositiveInt = 1
    """Replicas; each is an independent server."""


class InferenceConfig(BaseConfig):
    """An inference server."""

    server: ServerConfig = ServerConfig()
    """Where it listens."""
    model: InferenceModelConfig = InferenceModelConfig()
    """The model."""
    parallel: ParallelConfig = ParallelConfig()
    """Devices and replicas."""
    backend: Literal["auto", "torch", "vllm"] = "auto"
    """The engine: Buckeye's own (torch) or vLLM."""
    max_num_seqs: PositiveInt = 128
    """Sequences decoded at the same time."""
    kv_cache_gb: Annotated[float, Field(gt=0.0)] | None = None
    """Memory of the key-value cache in GB; None takes a quarter of what there is."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """vLLM: share of the GPU's memory."""
    seed: int | None = None
    """Seed of requests that bring none."""
    weight_broadcast: SharedWeightBroadcastConfig = SharedWeightBroadcastConfig()
    """How weights arrive."""
    vllm: dict[str, Any] = {}
    """Further settings for vLLM."""
    log: LogConfig = LogConfig()
    """What is logged."""
    output_dir: Path = Path("outputs")
    """The run directory."""
