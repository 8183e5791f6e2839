"""`rl` with an adapter: engines receive only the adapter and sample from it; a resumed run is identical."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.printed_commands import follow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LORA = (
    *("--trainer.model.experimental.lora.rank", 8, "--trainer.optim.lr", "1e-2"),
    *("--trainer.model.experimental.lora.modules-to-save", "norm"),
)


@pytest.fixture(autouse=True)
def _easier(runner, tmp_path):
    """Reward any letter, so that every step has a gradient, and enlarge the frozen output layer.

    With the original output layer, no hidden state could make a token likely.
    """
    environment = runner.root / "letters.py"
    rare, common = 'reply.text[:3].count("a")', "sum(c.isalpha() for c in reply.text[:3])"
    assert rare in environment.read_text()
    environment.write_text(environment.read_text().replace(rare, common))
    runner.model = shutil.copytree(runner.model, tmp_path / "base")
    tensors = load_file(runner.model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 5
    save_file(tensors, runner.model / "model.safetensors", metadata={"format": "pt"})


def test_it_learns_and_engine_and_trainer_agree(runner):
    done = runner.ok(runner.rl("out", *LORA, steps=16, level=0), limit=300)
    out = runner.root / "out"
    newest = out / "weights" / "step_16"
    assert json.loads((newest / "manifest.json").read_text())["adapter"] is True
    assert [p.name for p in newest.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert not list((out / "checkpoints").rglob("model.safetensors"))
    trainer = runner.metrics("out", "trainer")
    assert len(trainer) == 16
    assert all(abs(r.get("mismatch_kl", 0.0)) < 1e-4 for r in trainer.values())
    rewards = [r["reward/mean"] for _, r in sorted(runner.metrics("out", "orchestrator").items())]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4
    ended = follow(runner, f"{done.stdout}\nbuckeye export out")
    assert {command: one.stderr for command, one in ended.items() if one.returncode} == {}
    places = ("weights/step_16", "exports/step_16", "exports/step_16-merged")
    assert ended.keys() >= {f"buckeye chat out/{place}" for place in places}


@pytest.mark.parametrize("rounding", ["4bit", "8bit"])
def test_rounded_base_is_sampled_and_trained_alike(runner, rounding):
    words = (*LORA, "--trainer.model.quantization", rounding, "--ckpt")
    runner.ok(runner.rl("out", *words, steps=3, level=0), limit=300)
    trainer = runner.metrics("out", "trainer")
    assert all(abs(record.get("mismatch_kl", 0.0)) < 1e-4 for record in trainer.values())
    for name, more in (("adapter", ()), ("merged", ("--merge-lora",))):
        done = runner.ok(runner.argv("export", "out", "-o", name, *more))
        assert f"trained on a {rounding} base" in done.stdout + done.stderr
    adapter = json.loads((runner.root / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(runner.model)
    base, merged = (
        load_file(folder / "model.safetensors") for folder in (runner.model, runner.root / "merged")
    )
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight") or name == "model.norm.weight"}
