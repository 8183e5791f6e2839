"""`rl` trains a random model of each family, and engine and trainer agree before and after an update."""

import shutil

import pytest
import torch

from tests.general_models import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
GENERAL = ("gemma2", "bloom", "mixtral", "phi", "cohere2", "gpt_neox", "stablelm")
FAMILIES = ("mistral", "smollm3", "phi3", "olmo2", "olmo3", "granite", "gemma3_text")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 128,
    "sliding_window": 6,
    "use_sliding_window": True,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}


@pytest.fixture
def make_family(runner, tiny_model, tmp_path):
    """Return a function that gives the runner a random model of a family, with the tiny model's tokenizer."""

    def make(family):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = shutil.copytree(tiny_model, tmp_path / family)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        config = {
            **SMALL,
            "vocab_size": 310,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(family, **config)).save_pretrained(directory)
        runner.model = directory

    return make


@pytest.mark.parametrize(
    ("family", "adapted"),
    [(family, None) for family in (*FAMILIES, *GENERAL)]
    + [
        ("phi", "q_proj,dense"),
        ("granite", "q_proj,down_proj"),
        ("phi3", "qkv_proj,gate_up_proj"),
        ("olmo3", "o_proj"),
    ],
)
def test_steps_of_a_family_keep_engine_and_trainer_equal(runner, make_family, family, adapted):
    make_family(family)
    words = []
    if adapted is not None:
        section = "--trainer.model.experimental.lora"
        words = [f"{section}.rank", 4, f"{section}.target-modules", adapted]
    environment = runner.root / "letters.py"
    rare, common = 'reply.text[:3].count("a")', "sum(c.isalpha() for c in reply.text[:3])"
    environment.write_text(environment.read_text().replace(rare, common))
    runner.ok(runner.rl("out", *words, "--ckpt", steps=2, level=0))
    steps = runner.metrics("out", "trainer")
    assert len(steps) == 2
    assert all(record["grad_norm"] > 0 for record in steps.values())
    assert all(abs(record.get("mismatch_kl", 0.0)) < 1e-5 for record in steps.values())
    if family in GENERAL:
        line = f"model type {family}: general path (transformers), slower than the built-in one"
        assert line in "".join(path.read_text() for path in (runner.root / "out" / "logs").rglob("*.log"))
        exported = runner.root / "exported"
        runner.ok(runner.argv("export", "out", "-o", exported, *(["--merge-lora"] if adapted else [])))
        _reload(exported)


def _reload(directory):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
