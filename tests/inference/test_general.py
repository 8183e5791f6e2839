"""Models without a built-in decoder: transformers computes them, and sequences of any length are batched."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from buckeye.errors import BuckeyeError
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.general_decoder import TransformersDecoder
from buckeye.inference.engine.weights import Checkpoint
from tests.general_models import QUICK, VOCAB, NotTinyError, tiny_model

from .conftest import finish, make_engine, sample
from .test_families import Saved, compare

PROMPTS = [tuple((7 * i + 3 * n) % VOCAB for i in range(n)) for n in (9, 1, 14, 5, 9)]
LENGTHS = (12, 20, 3, 8, 15)


def save(family, directory, **changes) -> Saved:
    model = tiny_model(family, **changes)
    model.save_pretrained(directory)
    return Saved(directory, model)


@pytest.mark.parametrize("family", QUICK)
def test_general_path_equals_transformers(family, tmp_path):
    first, second = save(family, tmp_path / "a"), save(family, tmp_path / "b", seed=1)
    assert isinstance(make_engine(first.directory).decoder, TransformersDecoder)
    compare(first, second)


@pytest.mark.parametrize("family", QUICK)
def test_sequences_of_a_batch_equal_generate(family, tmp_path):
    model = save(family, tmp_path)
    engine = make_engine(tmp_path, slots=3, max_len=40, spare=1)  # fewer slots than sequences
    sequences = [sample(p, max_tokens=n, temperature=0) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    finish(engine, *sequences)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.reference.generate(
            tokens, max_new_tokens=len(sequence.token_ids), do_sample=False, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == sequence.token_ids
        text = torch.tensor([*prompt, *sequence.token_ids])
        found = engine.decoder.prompt_logprobs(text.tolist())
        logprobs = model.logits(text)[:-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]
        assert found == pytest.approx(logprobs.tolist(), abs=1e-4)


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


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_of_transformers_works_or_is_refused(family, tmp_path):
    try:
        model = save(family, tmp_path)
    except NotTinyError as error:
        pytest.skip(str(error))
    try:
        engine = make_engine(tmp_path, max_len=40)
    except BuckeyeError as error:
        if error.code == "BK-MODEL-UNSUPPORTED":
            return
        raise
    sequences = [sample(p, max_tokens=n, temperature=0) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    finish(engine, *sequences)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        text = torch.tensor([*prompt, *sequence.token_ids])
        scores = model.logits(text)[len(prompt) - 1 : -1]
        assert (scores.amax(-1) - scores.gather(1, text[len(prompt) :, None])[:, 0]).max() < 2e-4
