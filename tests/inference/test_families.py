"""The table of docs/reference/models.md, by test: each cell for random models over all fields of a class.

Models compute what transformers and PEFT compute, in float32, or are refused.
"""

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from buckeye.config.trainer import LoRAConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.client import SamplingParams
from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.general_spec import GeneralSpec, read_served_spec, unroundable_reason
from buckeye.inference.vllm.interpreter import find_vllm
from buckeye.launch.preflight.model_files import check_model_files
from buckeye.trainer.model.lora import add_adapter
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.model.trainable import check_trainable
from buckeye.transport.weights import read_weights_manifest
from tests.general_models import (
    QUICK,
    NotTinyError,
    changed_fields,
    field_values,
    save_uncomputable,
    tiny_model,
)
from tests.whole.docs.reference_tool import reference

from .conftest import VOCAB as TOKENS
from .conftest import Server, client_of, make_engine, near
from .family_checks import (
    CPU,
    LENGTH,
    Saved,
    check_adapter,
    check_engine,
    check_export,
    check_trainer,
    close,
    next_logits,
)
from .test_adapters import adapt
from .test_adapters import publish as publish_adapter
from .test_server import publish as publish_model

LAYERS, VOCAB = 4, 96
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "olmo2", "olmo3", "granite", "gemma3_text"),
    "qwen3_moe",
)
ADAPTED = ("LoRA", "QLoRA", "export")
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


def known_fields(family):
    kind = CONFIG_MAPPING[family]
    return kind().to_dict().keys() | kind.attribute_map.keys()


@st.composite
def configs(draw, family):
    """Draw keys of the configuration class of a family, and a kind of rotary positions."""
    kind, known = CONFIG_MAPPING[family], known_fields(family)
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
    """Save a random model. Raise `NotTinyError` if transformers cannot compute it."""
    if family not in FAMILIES:
        model = tiny_model(family, seed=seed, **config)
        model.save_pretrained(directory)
        return Saved(directory, model)
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


def check_cell(family, cell, config, folder: Path, state: str) -> None:
    """Check a cell of the table for one model, or its refusal."""
    model = save(family, config, folder / "model")
    if cell == "engine":
        check_engine(model, save(family, config, folder / "other", seed=1))
    elif cell == "trainer":
        check_trainer(model)
    elif cell == "export":
        check_export(model, folder)
    elif cell == "QLoRA" and unroundable_reason(model.directory, read_served_spec(model.directory)):
        assert state == "refused" or isinstance(read_served_spec(model.directory), GeneralSpec)
    elif state != "refused":
        check_adapter(model, folder, quantization="4bit" if cell == "QLoRA" else None)
    else:
        policy = load_policy(str(model.directory), CPU, frozen=True)
        lora = LoRAConfig(target_modules=["c_attn"])
        with pytest.raises(UsageError) as refused:
            add_adapter(policy.model, lora, base="", frozen_dtype=torch.float32)
        assert refused.value.code == "BK-CONFIG-VALUE"


CELLS = [(family, cell) for family in (*FAMILIES, *QUICK) for cell in ("engine", "trainer", *ADAPTED)]


def is_fast(family, cell) -> bool:
    return cell not in ADAPTED or family in (
        "qwen3",
        "phi3",
        "gemma3_text",
        "qwen3_moe",
        "gpt2",
        "deepseek_v3",
    )


@pytest.mark.parametrize(
    ("family", "cell", "examples"),
    [
        *(pytest.param(*c, 1, marks=[] if is_fast(*c) else [pytest.mark.slow]) for c in CELLS),
        *(pytest.param(*c, 30, marks=pytest.mark.slow) for c in CELLS),
    ],
)
def test_cell_of_the_table(family, cell, examples):
    state = reference.model_states(family)[cell]

    @settings(max_examples=examples)
    @given(configs(family) if family in FAMILIES else changed_fields(family))
    def check(config):
        with TemporaryDirectory() as folder:
            try:
                check_cell(family, cell, config, Path(folder), state)
            except NotTinyError:
                return

    check()


def test_padded_rows_with_weights_of_4_bits_are_exact(tmp_path):
    config = {**SMALL, "final_logit_softcapping": 2.0}
    config = {key: value for key, value in config.items() if key in known_fields("gemma3_text")}
    check_cell("gemma3_text", "QLoRA", config, tmp_path, "built-in")


@pytest.mark.parametrize("family", [*FAMILIES, *QUICK])
def test_plain_model_has_the_path_of_the_table(family, tmp_path):
    config = {key: value for key, value in SMALL.items() if key in known_fields(family)}
    save(family, config if family in FAMILIES else {}, tmp_path)
    states = reference.model_states(family)
    is_general = isinstance(check_model_files(tmp_path, "engine"), GeneralSpec)
    assert states["engine"] == ("general" if is_general else "built-in")
    if states["trainer"] == "built-in":
        assert not load_policy(str(tmp_path), CPU).padded


SERVED = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": TOKENS,
}
"""Sizes that vLLM computes on a CPU. Its smallest heads have 32 dimensions."""


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        pytest.param(family, adapted, id=f"{family}-{'adapter' if adapted else 'weights'}")
        for family in reference.TEXTS["models"]["vllm"]
        for adapted in (False, True)
        if not adapted or family not in reference.TEXTS["models"]["vllm_without_lora"]
    ],
)
async def test_vllm_agrees_with_the_trainer(family, adapted, tokenizer, tmp_path):
    """Compare log-probs before and after an update of the weights, or of an adapter."""
    found = find_vllm()
    if found is None:
        pytest.skip("vLLM is not installed")
    known = known_fields(family)
    config = {key: value for key, value in (SMALL | SERVED).items() if key in known}
    first, second = (save(family, config, tmp_path / name, seed=n) for n, name in enumerate(("a", "b")))
    if family == "granite":  # it does not scale scores by default, and float32 rounds large ones by 2e-3
        for model in (first, second):
            _shrink_queries(model)
    tokenizer.save_pretrained(first.directory)
    settings = {"backend": "vllm", "vllm_python": str(found.python), "max_num_seqs": 4}
    settings |= {"max_lora_rank": 4} if adapted else {}
    if adapted:
        second = Saved(first.directory, adapt(first.reference, seed=1, target_modules=first.linear_names))
    publish = publish_adapter if adapted else publish_model
    path = publish(second.reference if adapted else second, tmp_path / "weights", 1)
    manifest = read_weights_manifest(path)
    with Server(first.directory, tmp_path / "run", **settings) as server:
        async with client_of(server, first) as client:
            for number, model in enumerate((first, second)):
                if number:
                    await client.update_weights(
                        path, 1, manifest.checksum, canary=manifest.canary, adapter=adapted
                    )
                reply = await client.generate([5, 6, 7], SamplingParams(max_tokens=12, seed=3))
                assert set(reply.versions) == {number}
                text = torch.tensor([5, 6, 7, *reply.token_ids])
                expected = model.logits(text)[2:-1].log_softmax(-1).gather(1, text[3:, None])[:, 0]
                assert torch.tensor(reply.logprobs) == near(expected)


@torch.no_grad()
def _shrink_queries(model: Saved) -> None:
    for layer in model.reference.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.1)
    model.reference.save_pretrained(model.directory)


REFUSED = {
    "key heads without effect": ("BK-MODEL-DAMAGED", "deepseek_v3", {"num_key_value_heads": 2}),
    "head size without effect": ("BK-MODEL-DAMAGED", "deepseek_v3", {"head_dim": 16}),
    "no multi-query": ("BK-MODEL-DAMAGED", "falcon", {"multi_query": False}),
    "cache of other layers": ("BK-MODEL-DAMAGED", "hrm_text", {"num_layers_per_stack": 3}),
    "no cache": ("BK-MODEL-UNSUPPORTED", "openai-gpt", {}),
    "memory instead of a cache": ("BK-MODEL-UNSUPPORTED", "xlnet", {}),
    "decoder of images": ("BK-MODEL-UNSUPPORTED", "trocr", {}),
    "decoder of speech": ("BK-MODEL-UNSUPPORTED", "whisper", {}),
    "later tokens": ("BK-MODEL-UNSUPPORTED", "doge", {"keep_window_size": 2}),
    "earlier and later tokens": ("BK-MODEL-UNSUPPORTED", "cpmant", {}),
    "layers that ignore adapters": (
        "BK-MODEL-UNSUPPORTED",
        "bloom",
        {"slow_but_exact": True, "pretraining_tp": 2},
    ),
    "logits of 0": ("BK-MODEL-DAMAGED", "minicpm3", {"scale_emb": 0}),
    "logits divided by 0": ("BK-MODEL-DAMAGED", "granite", {"logits_scaling": 0.0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_uncomputable_model_is_refused_before_a_start(case, tmp_path):
    code, family, changes = REFUSED[case]
    assert save_uncomputable(family, tmp_path, **changes)
    with pytest.raises(BuckeyeError) as refused:
        check_model_files(tmp_path, "engine")
    assert refused.value.code == code
    assert refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_is_computed_or_refused_before_a_start(family):
    """Change each field of the class: engine and trainer equal transformers, or no process starts."""
    try:
        changes = [{key: value} for key, values in field_values(family).items() for value in values]
    except Exception:  # the default values of some classes do not fit each other
        changes = []
    for change in [{}, *changes]:
        with TemporaryDirectory() as folder:
            _check_step(family, copy.deepcopy(change), Path(folder))


def _check_step(family, change, folder: Path) -> None:
    must_be_tiny = not change and "reason" not in reference.model_states(family)
    try:
        model = Saved(folder, tiny_model(family, **change))
        model.reference.save_pretrained(folder)
    except NotTinyError:
        assert not must_be_tiny
        model = None
        if not save_uncomputable(family, folder, **change):
            return
    except Exception:  # transformers cannot save it
        assert not must_be_tiny
        return
    code = None
    try:
        check_model_files(folder, "engine")
        check_trainable(str(folder))
    except BuckeyeError as error:
        code = error.code
    assert code in (None, "BK-MODEL-UNSUPPORTED", "BK-MODEL-DAMAGED")
    if code is None:
        assert model is not None, change
        check_trainer(model)


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
    close(plain, model.logits(ids)[-1])


def test_long_angles_limit_the_context(tmp_path):
    """Beyond the original context, transformers changes the angles of all positions."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = {**SMALL, "rope_parameters": rope, "original_max_position_embeddings": 20}
    known = CONFIG_MAPPING["phi3"]().to_dict().keys()
    save("phi3", {key: value for key, value in config.items() if key in known}, tmp_path)
    assert read_spec(tmp_path).max_positions == 20
