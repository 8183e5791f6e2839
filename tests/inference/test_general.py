"""Models without a built-in decoder: transformers computes them, and sequences of any length are batched."""

import pytest
import torch

from buckeye.inference.engine.general_decoder import TransformersDecoder
from tests.general_models import QUICK, VOCAB, tiny_model

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
