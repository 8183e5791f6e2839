"""Random small models of every family with its own decoder compute what transformers computes in float32."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.decoder import Chunk, Decoder
from buckeye.inference.engine.weights import Checkpoint

from .conftest import finish, make_engine, sample

LAYERS, VOCAB, LENGTH, TOLERANCE = 4, 96, 24, 1e-4
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "olmo2", "olmo3", "granite", "gemma3_text"),
    "qwen3_moe",
)
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
flags = st.booleans()
kinds = st.sampled_from(["full_attention", "sliding_attention"])
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with its options": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "longrope": {"original_max_position_embeddings": 48},
}
"""Settings of kinds of rotary positions; the lists of "longrope" have one number per angle."""
FIELDS = {
    "num_attention_heads": st.sampled_from([2, 4]),
    "num_key_value_heads": st.sampled_from([1, 2]),
    "head_dim": st.sampled_from([8, 16]),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    "tie_word_embeddings": flags,
    "attention_bias": flags,
    "mlp_bias": flags,
    "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]),
    "hidden_activation": st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    "sliding_window": st.sampled_from([None, 1, 5, LENGTH + 10]),
    "use_sliding_window": flags,
    "max_window_layers": st.integers(0, LAYERS),
    "layer_types": st.lists(kinds, min_size=LAYERS, max_size=LAYERS),
    "no_rope_layers": st.lists(st.integers(0, 1), min_size=LAYERS, max_size=LAYERS),
    "no_rope_layer_interval": st.integers(1, 4),
    "attention_multiplier": st.sampled_from([0.1, 1.0]),
    "residual_multiplier": st.sampled_from([0.2, 1.0]),
    "embedding_multiplier": st.sampled_from([2.0, 12.0]),
    "logits_scaling": st.sampled_from([1.0, 8.0]),
    "final_logit_softcapping": st.sampled_from([None, 2.0]),
    "attn_logit_softcapping": st.sampled_from([None, 2.0]),
    "query_pre_attn_scalar": st.sampled_from([8, 256]),
    "decoder_sparse_step": st.integers(1, 2),
    "mlp_only_layers": st.sampled_from([None, [0], [1, 2]]),
    "norm_topk_prob": flags,
}


@dataclass
class Saved:
    """Model in a directory, and the model of transformers with its weights."""

    directory: Path
    reference: torch.nn.Module

    def logits(self, ids):
        with torch.inference_mode():
            return self.reference(ids[None], use_cache=False).logits[0]


@st.composite
def configs(draw, family):
    """Draw keys of the configuration class of a family, and a kind of rotary positions."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    fields = {key: strategy for key, strategy in FIELDS.items() if key in known}
    config = {key: value for key, value in SMALL.items() if key in known}
    config |= draw(st.fixed_dictionaries({}, optional=fields))
    if "sliding_attention" in config.get("layer_types", ()):
        config["sliding_window"] = draw(st.sampled_from([1, 5]))
        config |= {"use_sliding_window": True} if "use_sliding_window" in known else {}
    if family in ("olmo3", "gemma3_text") and config.get("sliding_window", 1) is None:
        del config["sliding_window"]  # transformers needs it, also without a layer of this kind
    rope = draw(_ropes(family, config, kind))
    return config | ({"rope_parameters": rope} if rope else {})


@st.composite
def _ropes(draw, family, config, kind):
    names = ["default", "longrope"] if family == "phi3" else list(ROPES)
    head_dim = getattr(kind(**config), "head_dim", None)
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]

    def rope(share=1.0):
        name = draw(st.sampled_from(names))
        parameters = {"rope_type": name.partition(" ")[0], "rope_theta": 1000.0, **ROPES[name]}
        if name == "longrope":
            count = int(head_dim * share) // 2
            parameters |= {"short_factor": [1.0 + i / 4 for i in range(count)], "long_factor": [9.0] * count}
        return parameters

    if family in ("olmo3", "gemma3_text"):
        return {"full_attention": rope(), "sliding_attention": rope()} if draw(flags) else None
    if family != "phi3":
        return rope()
    share = draw(st.sampled_from([0.5, 1.0]))
    return {**rope(share), "partial_rotary_factor": share}


def save(family, config, directory, *, seed=0) -> Saved:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**config), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(directory)
    return Saved(directory, model.eval())


def next_logits(decoder: Decoder, ids, *cuts: int):
    """Return the logits after `ids`. Prefill them in parts that end at `cuts`, each in another slot."""
    start, slot = 0, 0
    for cut in (*cuts, len(ids) - 1):
        if start:
            decoder.cache.copy(slot, slot + 1, start)
            slot += 1
        if cut > start:
            decoder.prefill([Chunk(slot, ids[start:cut], start)])
        start = cut
    decoder.cache.copy(slot, 0, start)
    return decoder.decode(ids[-1:], torch.tensor([len(ids) - 1]), len(ids))[0].clone()


def compare(model: Saved, other: Saved) -> None:
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    expected = model.logits(ids)
    engine = make_engine(model.directory, max_len=48, spare=4)
    decoder = engine.decoder
    with torch.inference_mode():
        for position in range(LENGTH):
            token, place = ids[position : position + 1], torch.tensor([position])
            logits = decoder.decode(token, place, position + 1)[0]
            torch.testing.assert_close(logits, expected[position], rtol=0, atol=TOLERANCE)
        for cuts in ((), (7,), (3, 12)):
            torch.testing.assert_close(next_logits(decoder, ids, *cuts), expected[-1], rtol=0, atol=TOLERANCE)
    _compare_greedy(engine, model, ids)
    decoder.weights.load(Checkpoint(other.directory))
    fresh = make_engine(other.directory, max_len=48).decoder
    with torch.inference_mode():
        assert torch.equal(next_logits(decoder, ids), next_logits(fresh, ids))


def _compare_greedy(engine, model: Saved, ids) -> None:
    """Compare greedy text of two prompts. The second prompt continues the first conversation."""
    prompt = tuple(ids[:6].tolist())
    for _ in range(2):
        finish(engine, one := sample(prompt, max_tokens=10, top_k=1))
        text = torch.tensor([*prompt, *one.token_ids])
        scores = model.logits(text)[len(prompt) - 1 : -1]
        chosen = scores.gather(1, text[len(prompt) :, None])[:, 0]
        assert (scores.amax(-1) - chosen).max() <= 2 * TOLERANCE
        prompt = (*prompt, *one.token_ids, 5)


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_model_of_a_family_equals_transformers(family, examples):
    @settings(max_examples=examples)
    @given(configs(family))
    def check(config):
        with TemporaryDirectory() as one, TemporaryDirectory() as two:
            compare(save(family, config, Path(one)), save(family, config, Path(two), seed=1))

    check()


def test_families_with_equal_weights_differ(tmp_path):
    """A setting that the engine ignored would leave the logits unchanged."""
    config = {key: value for key, value in SMALL.items() if "expert" not in key and "moe" not in key}
    model = save("granite", config, tmp_path)
    ids = torch.arange(9)
    plain = next_logits(make_engine(tmp_path).decoder, ids)
    written = json.loads((tmp_path / "config.json").read_text())
    for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        (tmp_path / "config.json").write_text(json.dumps(written | {key: 3.0}))
        assert not torch.allclose(next_logits(make_engine(tmp_path).decoder, ids), plain, atol=0.01), key
    torch.testing.assert_close(plain, model.logits(ids)[-1], rtol=0, atol=TOLERANCE)


def test_long_angles_limit_the_context(tmp_path):
    """Beyond the original context, transformers changes the angles of all positions."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = {**SMALL, "rope_parameters": rope, "original_max_position_embeddings": 20}
    known = CONFIG_MAPPING["phi3"]().to_dict().keys()
    save("phi3", {key: value for key, value in config.items() if key in known}, tmp_path)
    assert read_spec(tmp_path).max_positions == 20
