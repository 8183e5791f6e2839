"""Tokenizers without torch are the ones that transformers itself would take."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from .chat_families import save_family

pytestmark = pytest.mark.slow

TEXT = "h\u00e9llo <|im_end|> <think>x</think> the dog\n  {}"
CASES = [
    ("qwen3", "qwen3", "TokenizersBackend"),
    ("llama3", "llama", "PreTrainedTokenizerFast"),
    ("smollm2", "llama", "GPT2Tokenizer"),
    ("qwen2.5", "qwen2", "Qwen2Tokenizer"),
    ("qwen3", "qwen3_moe", "Qwen2TokenizerFast"),
]
"""Family, `model_type`, `tokenizer_class`."""

LOAD = f"""
import json, sys
from buckeye.inference.render import ChatRenderer
for directory in sys.argv[1:]:
    renderer = ChatRenderer(directory)
    tokenizer, prompt = renderer.tokenizer, renderer.render([{{"role": "user", "content": "the dog?"}}])
    print(json.dumps([
        type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), tokenizer.encode({TEXT!r}),
        prompt.text, renderer.family and renderer.family.name, "torch" in sys.modules,
    ]))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    found = []
    for family, model_type, named in CASES:
        directory = save_family(family, tmp_path_factory.mktemp(model_type))
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": named}))
        found.append(directory)
    return found


def loaded_alone(directories) -> list[list]:
    """What a process of its own makes of the directories."""
    command = [sys.executable, "-c", LOAD, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_known_tokenizers_are_loaded_as_transformers_does_but_without_torch(directories):
    for directory, (kind, backend, ids, text, _, torch) in zip(
        directories, loaded_alone(directories), strict=True
    ):
        expected = AutoTokenizer.from_pretrained(directory)
        assert (kind, backend, ids) == (
            type(expected).__name__,
            expected.backend_tokenizer.to_str(),
            expected.encode(TEXT),
        )
        assert "the dog?" in text
        assert not torch


def test_a_tokenizer_of_an_unknown_family_is_left_to_transformers(directories, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((directories[0] / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    (result,) = loaded_alone([tmp_path])
    assert result[0] == type(AutoTokenizer.from_pretrained(tmp_path)).__name__
    assert result[-1]  # transformers needs torch to choose
