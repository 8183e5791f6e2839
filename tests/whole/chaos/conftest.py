"""The tiny model of all runs here."""

import pytest

from buckeye.trainer.model.tiny import TinySize, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    texts = ["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(path, texts=texts, size=size, seed=0)
    return path
