"""A third party's model directory can only be refused with a message."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.inference.chat_families import save_family
from tests.whole.security.surroundings import Surroundings

from buckeye.base.foreign_files import NotRegularFileError, list_regular_files

MOST_GROWTH_MB = 300
SIZES = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
NUMBERS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True}
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES, **HEADS, **NUMBERS}


def tensors(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {
        "model.embed_tokens.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
    }


def write(folder, config=CONFIG, weights=None, **files):
    (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    (folder / "model.safetensors").write_bytes(tensors(one(), bytes(16)) if weights is None else weights)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def pipe(name):
    def make(folder, _):
        write(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def linked(name, target):
    def make(folder, victim):
        write(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target.format(victim=victim))

    return make


def sparse(name, size):
    def make(folder, _):
        write(folder)
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


HOSTILE = {
    "config of two gigabytes": sparse("config.json", 2 * 2**30),
    "config nested without end": lambda folder, _: write(folder, b"[" * 200_000),
    "config of another kind": lambda folder, _: write(folder, {**CONFIG, "hidden_size": "x" * 100}),
    "config with huge sizes": lambda folder, _: write(folder, {**CONFIG, "vocab_size": 2**60}),
    "config that is a pipe": pipe("config.json"),
    "config that is a folder": lambda folder, _: (folder / "config.json").mkdir(),
    "weights that are a pipe": pipe("model.safetensors"),
    "index that names files outside": lambda folder, victim: write(
        folder,
        model__safetensors__index__json={"weight_map": {"x": f"../{victim.name}/.ssh/authorized_keys"}},
    ),
    "index that names an absolute file": lambda folder, victim: write(
        folder,
        model__safetensors__index__json={"weight_map": {"x": str(victim / ".ssh/authorized_keys")}},
    ),
    "header longer than the file": lambda folder, _: write(folder, weights=tensors(one(), length=2**62)),
    "header of a gigabyte": sparse("model.safetensors", 2**30),
    "header without JSON": lambda folder, _: write(folder, weights=tensors(b"\xff" * 100)),
    "tensors that overlap": lambda folder, _: write(
        folder, weights=tensors({**one(), "b": one()["model.embed_tokens.weight"]}, bytes(16))
    ),
    "tensors beyond the file": lambda folder, _: write(folder, weights=tensors(one(offsets=(0, 2**40)))),
    "tensors of negative sides": lambda folder, _: write(
        folder, weights=tensors(one(shape=(-2, 2)), bytes(16))
    ),
    "tensors of an unknown kind": lambda folder, _: write(
        folder, weights=tensors(one(dtype="EVIL"), bytes(16))
    ),
    "pickles only": lambda folder, _: (
        (folder / "config.json").write_text(json.dumps(CONFIG)),
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR."),
    ),
    "own code": lambda folder, _: write(
        folder,
        {**CONFIG, "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        evil__py="open('ran', 'w')",
    ),
    "weights that lead out": linked("model.safetensors", "{victim}/.ssh/authorized_keys"),
}

LOAD = """
import json, sys
from pathlib import Path
from buckeye.errors import BuckeyeError
from buckeye.inference.engine.architecture import check_sizes, read_spec
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights
import torch
def memory():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
for folder in map(Path, sys.argv[1:]):
    before, said = memory(), None
    try:
        check_sizes(folder)
        weights = DecoderWeights(read_spec(folder), dtype=torch.float32, device=torch.device("cpu"))
        weights.check(Checkpoint(folder))
    except BuckeyeError as error:
        said = str(error)
    print(json.dumps([said, memory() - before]))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Load each folder in a process, and keep its output."""
    base = tmp_path_factory.mktemp("models")
    around = Surroundings(base)
    folders = []
    for name, make in HOSTILE.items():
        folder = base / name.replace(" ", "-")
        folder.mkdir()
        make(folder, around.victim)
        folders.append(folder)
    argv = [sys.executable, "-c", LOAD, *map(str, folders)]
    printed = subprocess.check_output(argv, text=True, cwd=base, timeout=300)
    results = [json.loads(line) for line in printed.splitlines()]
    return base, around, dict(zip(HOSTILE, results, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_is_refused_in_words(loaded, name):
    _, _, results = loaded
    said, growth = results[name]
    assert said is not None
    assert len(said) < 2000
    assert growth < MOST_GROWTH_MB


@pytest.mark.e2e
def test_nothing_ran_and_nothing_outside_was_touched(loaded):
    base, around, _ = loaded
    assert not list(base.rglob("ran"))
    assert around.untouched()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_ours_does_not_travel_as_one_of_the_models(tmp_path, name, refusal):
    from buckeye.errors import UsageError
    from buckeye.trainer.output.hf_directory import read_tokenizer_files

    around = Surroundings(tmp_path)
    folder = save_family("qwen3", tmp_path / "model")
    assert read_tokenizer_files(str(folder))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(around.victim / ".ssh/authorized_keys")
    with refusal(UsageError):
        read_tokenizer_files(str(folder))


def test_links_of_a_hubs_cache_are_the_models_own(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "same.json").symlink_to("config.json")
    assert [Path(path).name for path in list_regular_files(snapshot)] == ["config.json", "same.json"]
    (snapshot / "other").symlink_to("../../../other")
    with pytest.raises(NotRegularFileError):
        list(list_regular_files(snapshot))
