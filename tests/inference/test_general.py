"""Adapters of models without a built-in decoder."""

import pytest
import torch

from buckeye.errors import BuckeyeError
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.weights import Checkpoint
from tests.general_models import tiny_model

from .conftest import make_engine


def save(family, directory) -> None:
    tiny_model(family).save_pretrained(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_is_applied_replaced_and_removed(dtype, tmp_path):
    from peft import LoraConfig, get_peft_model

    save("phi", tmp_path / "base")
    ids, texts = torch.arange(9), []
    engine = make_engine(tmp_path / "base", dtype=dtype)
    weights, plain = engine.decoder.weights, engine.decoder.prompt_logprobs(ids.tolist())
    for number in range(2):
        adapted = get_peft_model(tiny_model("phi"), LoraConfig(r=2, target_modules=["q_proj", "dense"]))
        torch.manual_seed(number)
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, 0, 0.3)
        adapted.save_pretrained(tmp_path / f"adapter-{number}")
        checkpoint = AdaptedCheckpoint(tmp_path / "base", tmp_path / f"adapter-{number}")
        weights.check(checkpoint)
        weights.load(weights.prepare(checkpoint))
        with torch.no_grad():
            logits = adapted.eval()(ids[None]).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found = engine.decoder.prompt_logprobs(ids.tolist())
        assert found == pytest.approx(expected.tolist(), abs=1e-4 if dtype == torch.float32 else 0.3)
        texts.append(found)
    assert texts[0] != texts[1]
    weights.load(weights.prepare(Checkpoint(tmp_path / "base")))
    assert engine.decoder.prompt_logprobs(ids.tolist()) == plain


def test_adapter_of_another_model_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    save("phi", tmp_path / "base")
    engine = make_engine(tmp_path / "base")
    other = get_peft_model(tiny_model("gpt_neox"), LoraConfig(r=2, target_modules=["query_key_value"]))
    other.save_pretrained(tmp_path / "adapter")
    checkpoint = AdaptedCheckpoint(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(BuckeyeError, match="query_key_value") as raised:
        engine.decoder.weights.check(checkpoint)
    assert raised.value.code == "BK-ADAPTER"
