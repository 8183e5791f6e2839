"""GGUF files made of small models, as `convert_hf_to_gguf.py` of llama.cpp writes them."""

import json

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers import AutoModelForCausalLM as AutoModel

from buckeye.trainer.model.tiny import train_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "one two three four five six seven"]
THETA = 50_000.0


def _rope(kind="default", **parameters):
    return {"rope_type": kind, "rope_theta": THETA, **parameters}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0)
_LONGROPE = {
    **_rope("longrope", original_max_position_embeddings=64, partial_rotary_factor=0.5),
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
_GEMMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
MODELS = {
    "arcee": ("arcee", {}),
    "ernie4_5": ("ernie4_5", {}),
    "gemma": ("gemma", _GEMMA),
    "gemma2": ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 16, **_GEMMA}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": _rope("linear", factor=8.0),
                "sliding_attention": _rope() | {"rope_theta": 1000.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 4,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _rope()},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 4}),
    "phi3 with longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
}
"""Model type and fields of models that can be written. Files have no settings for some of the fields."""
_ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2", "qwen3_moe": "qwen3moe"}
_PAIRS_NEIGHBORS = ("arcee", "granite", "llama", "mistral", "smollm3")
_FIELDS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "sliding_window": "sliding_window",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Methods `add_...` of the writer, by the fields that they write."""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def make_model(kind, **changes):
    """Return a small model of the `kind`, a key of `MODELS`, and its tokenizer."""
    model_type, fields = MODELS[kind]
    trained = train_tokenizer(TEXTS, vocab_size=320)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # large, so that logits differ
        "rope_parameters": _rope(),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
        "head_dim": 16,
    }
    if model_type.startswith("gemma"):
        sizes["vocab_size"] = len(tokenizer)  # the converter removes other embeddings
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[model_type](**sizes | fields | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)  # norms of 1 and biases of 0 prove nothing
            assert parameter.dtype == torch.float32, name
    return model, tokenizer


def write_gguf(path, model, tokenizer, *, numbers="F32", left_out=(), extra=None, fields=None):
    """Write the file. `numbers` is the type of matrices; `left_out` are names of tensors that it lacks."""
    config = model.config
    writer = gguf.GGUFWriter(path, _ARCHITECTURES.get(config.model_type, config.model_type))
    writer.add_name("tiny")
    for field, method in _FIELDS.items():
        if getattr(config, field, None) is not None:
            getattr(writer, f"add_{method}")(getattr(config, field))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    _add_rope(writer, config, head_dim)
    for name, value in (fields or {}).items():
        key = name.format(arch=writer.arch)
        writer.kv_data[0].pop(key, None)
        if value is None:
            continue
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(_key(writer.arch), config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        for module, kind, values in _split_experts(name, parameter.detach()):
            tensor_name = f"{names.get_name(module)}.{kind}"
            if tensor_name not in left_out:
                _add_tensor(writer, tensor_name, _as_written(name, values, config), numbers)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _key(architecture):
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _add_rope(writer, config, head_dim):
    every = config.rope_parameters
    rope = every.get("full_attention", every)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in every:
        writer.add_rope_freq_base_swa(every["sliding_attention"]["rope_theta"])
    if share := rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(share * head_dim))
    if rope["rope_type"] in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _split_experts(name, values):
    """Yield the module, its kind of parameter, and its values: one for each tensor of llama.cpp."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate_proj", "up_proj"), values.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", part), "weight", half.contiguous()
    elif name.endswith("experts.down_proj"):
        yield name, "weight", values
    else:
        yield *name.rsplit(".", 1), values


def _as_written(name, values, config):
    """Return the weights in the order of llama.cpp, which pairs neighbors in some rotary embeddings."""
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return (values + 1).numpy()
    if config.model_type not in _PAIRS_NEIGHBORS or not (".q_proj." in name or ".k_proj." in name):
        return values.numpy()
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    shape = values.shape
    split = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return split.swapaxes(1, 2).reshape(shape).contiguous().numpy()


def _add_tensor(writer, name, values, numbers):
    kind = gguf.GGMLQuantizationType[numbers]
    if values.ndim == 1 or numbers == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif numbers == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def quantize(values, kind):
    """Return the values as bytes of a quantized tensor. `gguf` can read Q4_K, but not write it."""
    return quantize_q4_k(values) if kind.name == "Q4_K" else gguf.quants.quantize(values, kind)


def quantize_q4_k(values):
    """Return rows of values in Q4_K: super-blocks of 256 values, each with 8 blocks of 32.

    A block is `d * scale * q - dmin * minimum` with q from 0 to 15, and 6 bits each for scale and minimum.
    """
    blocks = values.reshape(-1, 8, 32)
    minima = np.maximum(-blocks.min(2), 0.0)
    steps = (blocks.max(2) + minima) / 15
    d, dmin = (np.float16(part.max(1, keepdims=True) / 63) for part in (steps, minima))
    scale, low = (
        np.clip(np.round(part / np.maximum(unit.astype(np.float32), 1e-9)), 0, 63).astype(np.uint8)
        for part, unit in ((steps, d), (minima, dmin))
    )
    width, offset = (np.float32(unit) * part for unit, part in ((d, scale), (dmin, low)))
    q = np.round((blocks + offset[..., None]) / np.maximum(width[..., None], 1e-9))
    q = np.clip(q, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        (scale[:, :4] | (scale[:, 4:] >> 4) << 6),
        (low[:, :4] | (low[:, 4:] >> 4) << 6),
        (scale[:, 4:] & 15 | (low[:, 4:] & 15) << 4),
    ]
    parts = [d.view(np.uint8), dmin.view(np.uint8), *packed, (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)]
    return np.concatenate(parts, axis=1).reshape(len(values), -1)


def _add_tokenizer(writer, tokenizer, vocab_size):
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_token_types(
        [
            unused if index not in names else control if names[index] in special else normal
            for index in range(vocab_size)
        ]
    )
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
