"""Models of the table compute in packed rows what transformers computes alone; some others are refused.

A refusal names the reason before anything is loaded.
"""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.inference.engine.general_spec import GeneralSpec, longest_sample, read_served_spec
from buckeye.launch.preflight.model_files import check_model_files
from buckeye.launch.preflight.trainer_checks import trainer_warnings
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import load_policy, make_policy
from buckeye.trainer.model.tiny import TinySize, make_tiny_model, train_tokenizer
from buckeye.trainer.model.trainable import FAMILIES, unpacked_reasons
from buckeye.trainer.parallel.shards import empty_policy
from tests.command import run_here
from tests.general_models import tiny_model
from tests.rounding import logprob_error

CPU = torch.device("cpu")
LAYERS = 4
WINDOW = 4
LENGTHS = [23, 9, 1, 9]
QUICK = ("llama", "qwen2", "qwen3", "mistral", "granite", "gemma3_text", "gpt2", "qwen3_moe")
SMALL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "n_layer": LAYERS,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 512,  # gpt2
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,  # opt
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
FIELDS = {
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "use_qk_norm": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    "hidden_act": st.sampled_from(["silu", "gelu", "relu"]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, LAYERS),
    "sliding_window": st.sampled_from([None, 2, WINDOW]),
    "layer_types": st.lists(
        st.sampled_from(["full_attention", "sliding_attention"]), min_size=LAYERS, max_size=LAYERS
    ),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([8, 16]),
    "no_rope_layers": st.lists(st.integers(0, 1), min_size=LAYERS, max_size=LAYERS),
    "attention_multiplier": st.sampled_from([0.1, 1.0]),
    "residual_multiplier": st.sampled_from([0.2, 1.0]),
    "embedding_multiplier": st.sampled_from([2.0, 12.0]),
    "logits_scaling": st.sampled_from([1.0, 8.0]),
    "final_logit_softcapping": st.sampled_from([None, 2.0]),
    "attn_logit_softcapping": st.sampled_from([None, 2.0]),
    "query_pre_attn_scalar": st.sampled_from([8, 256]),
    "use_bidirectional_attention": st.booleans(),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.integers(1, 2),
    "mlp_only_layers": st.sampled_from([[], [0]]),
    "is_causal": st.booleans(),
    "rope_scaling": st.sampled_from(
        [
            None,
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [9.0] * 4,
                "original_max_position_embeddings": 32,
            },
        ]
    ),
}


def small_config(family, **changes):
    """Return a configuration of four layers; `changes` apply to the keys that its class has."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys() | {"is_causal"}
    known |= {"rope_scaling"} if "rope_parameters" in known else set()
    return kind(**{key: value for key, value in (SMALL | changes).items() if key in known})


def compare(config) -> None:
    """Assert that samples in one packed row agree with each alone; the longest exceed every window."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    packed = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    )
    packed.load_state_dict(plain.state_dict())
    policy = make_policy(packed, "of a test", CPU, flash=False, compute_dtype="float32")
    policy.model.eval()  # some families use dropout
    samples = [torch.randint(0, SMALL["vocab_size"], (length,)) for length in LENGTHS]
    with torch.no_grad():
        hidden = policy.hidden_states(torch.cat(samples), LENGTHS)
        alone = torch.cat([plain(input_ids=ids[None], use_cache=False).logits[0] for ids in samples])
    found, expected = ((logits).log_softmax(-1) for logits in (hidden @ policy.head_weight.t(), alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * logprob_error(layers=LAYERS, width=128))


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_packed_rows_of_a_family_equal_separate_samples(family):
    config = small_config(family)
    assert unpacked_reasons(config.to_dict()) == []
    compare(config)


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
@pytest.mark.parametrize("token", [0, 5])
def test_every_row_and_parameter_of_a_family_can_train(family, token):
    config = small_config(family, **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), token))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    )
    everything = dict(model.named_parameters())
    policy = make_policy(model, "of a test", CPU, flash=False, compute_dtype="float32")
    policy.model.eval()
    assert policy.trainable.keys() == everything.keys()
    with torch.no_grad():
        for parameter in everything.values():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ids = torch.arange(12)
    hidden = policy.hidden_states(ids, [len(ids)])
    (hidden @ policy.head_weight.t()).log_softmax(-1)[ids, ids].sum().backward()
    still = [name for name, p in policy.trainable.items() if p.grad is None or not p.grad.any()]
    assert still == []
    assert policy.model.get_input_embeddings().weight.grad[ids].any(-1).all()


def packed_or_not(family):
    known = small_config(family).to_dict().keys() | {"rope_scaling", "is_causal"}
    strategies = {key: strategy for key, strategy in FIELDS.items() if key in known}

    @given(st.fixed_dictionaries({}, optional=strategies))
    def check(changes):
        try:
            config = small_config(family, **changes)
            AutoModelForCausalLM.from_config(config, attn_implementation="eager")(torch.ones(1, 2).long())
        except Exception:  # transformers has no such model, and raises exceptions of any class
            return
        refused = "; ".join(unpacked_reasons(config.to_dict()))
        if refused:
            assert any(key in refused for key in (*changes, "rope type")), refused
        else:
            compare(config)

    return check


@pytest.mark.parametrize(
    ("family", "examples"),
    [
        *((family, 8) for family in ("llama", "qwen2", "gemma3_text")),
        *(pytest.param(family, 40, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_configuration_is_unpacked_or_packed_correctly(family, examples):
    settings(max_examples=examples)(packed_or_not(family))()


@pytest.fixture
def folder(tiny_model, tmp_path):
    """Return a function that saves a model directory with a configuration that may not match its weights."""

    def made(**changes):
        config = json.loads((tiny_model / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
        return tmp_path

    return made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bloom", "is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"model_type": "bloom", "vision_config": {"depth": 2}}, "vision_config"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"model_type": "bert"}, "an encoder"),
        ({"model_type": "rwkv"}, "recurrent"),
    ],
)
def test_untrainable_model_is_refused_before_loading(folder, changes, said):
    directory = folder(**changes)
    for build in (load_policy, lambda *words: empty_policy(*words, flash=False)):
        with pytest.raises(UsageError, match=said):
            build(str(directory), CPU)
    config = load_config(RLConfig, ["--trainer", "--orchestrator", "--inference"])
    (line,) = trainer_warnings(config, directory, on_gpu=False)  # shown by doctor and dry run
    assert line.startswith(f"model.name: {directory}/config.json: ")
    assert said in line


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 24),
        (
            {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [9.0] * 4},
            23,
        ),
    ],
)
def test_samples_beyond_the_limit_of_rotary_positions_are_refused(rope, limit):
    original = {"original_max_position_embeddings": limit} if rope["rope_type"] == "longrope" else {}
    config = small_config("llama", rope_scaling=rope | original, max_position_embeddings=24)
    assert unpacked_reasons(config.to_dict()) == []
    assert longest_sample(config.to_dict()) == limit
    compare(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    policy = make_policy(model, "of a test", CPU, flash=False, compute_dtype="float32")
    with pytest.raises(UsageError, match=f"to {limit}"):
        policy.hidden_states(torch.zeros(limit + 1, dtype=torch.int64), [limit + 1])


def test_rotary_positions_of_one_kind_of_layer_limit_the_length(tmp_path):
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [9.0] * 4}
    ropes = {
        "full_attention": long | {"original_max_position_embeddings": 23},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    tiny_model("mellum").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": ropes}))
    spec = read_served_spec(tmp_path)
    assert (type(spec), spec.max_positions) == (GeneralSpec, 23)


def test_no_embedding_of_a_tiny_model_is_zero(tmp_path):
    """RMSNorm has huge gradients for a zero embedding, which transformers gives the pad token."""
    size = TinySize(vocab_size=300, layers=1, hidden=64)
    make_tiny_model(tmp_path / "model", texts=["a b c"] * 9, size=size, seed=0)
    embeddings = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    norms = embeddings.float().norm(dim=-1)
    assert norms.min() > 0.5 * norms.median()


def test_sft_refuses_a_vision_model_and_writes_nothing(tmp_path):
    directory = tmp_path / "model"
    size = TinySize(vocab_size=300, layers=1, hidden=64)
    make_tiny_model(directory, texts=["a b c"] * 9, size=size, seed=0)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "bloom", "vision_config": {"depth": 2}}
    (directory / "config.json").write_text(json.dumps(config))
    words = ["--model.name", directory, "--data.path", tmp_path / "chats.jsonl"]
    done = run_here("sft", *words, "--output-dir", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "vision_config" in done.stderr
    assert not (tmp_path / "out").exists()


def test_keys_that_doge_selects_limit_the_length(tmp_path):
    """Beyond them, it selects keys by all tokens, also by later ones."""
    tiny_model("doge", keep_window_size=9).save_pretrained(tmp_path)
    spec = check_model_files(tmp_path, "engine")
    assert spec is not None
    policy = load_policy(str(tmp_path), CPU)
    assert spec.max_positions == longest_sample(policy.model.config.to_dict()) == 9
    row = pack_micro_batch([np.zeros(10, np.int32)], [np.arange(10) > 0], CPU)
    with pytest.raises(UsageError, match="to 9"):
        policy(row, torch.ones(9))


def test_tokenizer_of_many_tags_fits_the_vocabulary():
    tags = [f"<{first}{second}>" for first in "abcdefgh" for second in "abcdefgh"]
    tokenizer = train_tokenizer([" ".join(tags)], vocab_size=300)
    assert len(tokenizer) == 300
    assert len(tokenizer.encode("<aa>")) == 1
    assert len(tokenizer.encode("<hh>")) > 1
