"""GGUF files made of small models, as `convert_hf_to_gguf.py` of llama.cpp writes them."""

import json

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from buckeye.trainer.model.tiny import train_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "one two three four five six seven"]
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make_model(kind, **changes):
    """Return a small model of the architecture `kind`, and its tokenizer."""
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS[kind](**sizes | {"head_dim": 16} | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)  # norms of 1 and biases of 0 prove nothing
            assert parameter.dtype == torch.float32, name
    return model, tokenizer


def write_gguf(path, model, tokenizer, *, numbers="F32", left_out=(), extra=None, fields=None):
    """Write the file. `numbers` is the type of matrices; `left_out` are names of tensors that it lacks."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    for name, value in (fields or {}).items():
        key = name.format(arch=config.model_type)
        writer.kv_data[0].pop(key, None)
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, parameter in model.named_parameters():
        tensor_name = _tensor_name(name)
        if tensor_name not in left_out:
            _add_tensor(writer, tensor_name, _as_written(name, parameter.detach(), config), numbers)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor_name(name):
    module, _, end = name.rpartition(".")
    if module in _ROOT:
        return f"{_ROOT[module]}.{end}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{end}"


def _as_written(name, values, config):
    """Return the weights in the order of llama.cpp, whose rotary embedding of Llama pairs neighbors."""
    if config.model_type != "llama" or not (".q_proj." in name or ".k_proj." in name):
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
