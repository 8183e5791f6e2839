"""Folder in which `buckeye rl` can train, without files that take time to make."""

import json
import math
import struct

from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.tensor_layout import tensor_shapes_of

CONFIG = """
job:
  metadata:
    environment: "my-env:latest"
system_prompt: |
  Write <tool>go("left")</tool>.
parser:
  use_thinking: false
action_mappings:
  go:
    _tool: "go"
    _parser:
      positional: ["direction"]
    direction:
      from_arg: "direction"
defaults:
  max_turns: 4
"""
LOCK = 'image: "my-env:latest"  # ours\n'
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


def task(number, **more):
    return {
        "id": f"t{number}",
        "prompt": f"Go to {number}.",
        "mcp_config": {"buckeye": {"url": "http://localhost:8765/mcp"}},
        "evaluate_tool": {"name": "evaluate"},
        **more,
    }


def write_model(folder):
    """Write a configuration and complete weights of a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    header, end = {}, 0
    for name, shape in tensor_shapes_of(read_spec(folder)).items():
        first, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    values = struct.pack("<2f", 0.5, 1.0) * (end // 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values)


def fill(folder):
    """Write a configuration, tasks and a model."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "my-env.yaml").write_text(CONFIG)
    (folder / "tasks.json").write_text(json.dumps([task(i) for i in range(6)]))
    write_model(folder / "tiny")


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
