"""Tokenizers loaded without torch are those that transformers would choose."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.tokenizer import rust_tokenizer

from .chat_families import save_family

TEXT = "h\u00e9llo <|im_end|> <think>x</think> the dog\n  {}"
LOAD = "import sys; from buckeye.inference.render import ChatRenderer; ChatRenderer(sys.argv[1]); "


def save(directory, family, model_type, tokenizer_class):
    save_family(family, directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": tokenizer_class}))
    return directory


@pytest.mark.parametrize(
    ("family", "model_type", "tokenizer_class"),
    [
        ("qwen3", "qwen3", "TokenizersBackend"),
        ("llama3", "llama", "PreTrainedTokenizerFast"),
        ("smollm2", "llama", "GPT2Tokenizer"),
        ("qwen2.5", "qwen2", "Qwen2Tokenizer"),
        ("qwen3", "qwen3_moe", "Qwen2TokenizerFast"),
        ("qwen3", "gemma3", "TokenizersBackend"),  # left to transformers
    ],
)
def test_tokenizer_equals_that_of_transformers(tmp_path, family, model_type, tokenizer_class):
    directory = save(tmp_path, family, model_type, tokenizer_class)
    found, expected = ChatRenderer(directory).tokenizer, AutoTokenizer.from_pretrained(directory)
    assert type(found).__name__ == type(expected).__name__
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.encode(TEXT) == expected.encode(TEXT)


@pytest.mark.e2e
def test_a_known_tokenizer_is_loaded_without_torch(tmp_path):
    directory = save(tmp_path, "qwen2.5", "qwen2", "Qwen2Tokenizer")
    code = LOAD + "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(directory)], check=False).returncode == 0


@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2", "qwen2.5"])
def test_text_and_ids_equal_those_of_transformers(tmp_path, family):
    save_family(family, tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(stored))
    renderer, expected = ChatRenderer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = expected.encode(TEXT, add_special_tokens=False)
    assert len(ids) > 3
    assert renderer.encode(TEXT) == ids
    assert renderer.decode(ids) == renderer.decode_in_thread(ids) == expected.decode(ids)


def test_a_tokenizer_that_changes_its_text_is_not_bypassed(tmp_path):
    save_family("smollm2", tmp_path)

    class Shouting(type(AutoTokenizer.from_pretrained(tmp_path))):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Shouting.from_pretrained(tmp_path)
    assert rust_tokenizer(tokenizer) is None
    assert rust_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) is not None
