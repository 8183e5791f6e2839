"""Weights directories: only complete ones of this attempt are found; damage is detected."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError
from buckeye.transport.weights import (
    newest_weights,
    prune_weights,
    publish_weights,
    read_weights_manifest,
    verify_weights,
)

ME = RunIdentity(run_id="run", attempt=2)


def _model(value: float):
    def fill(directory: Path) -> None:
        save_file({"w": np.full(4, value, np.float32)}, directory / "model-00001-of-00002.safetensors")
        save_file({"v": np.full(4, value, np.float32)}, directory / "model-00002-of-00002.safetensors")
        (directory / "config.json").write_text("{}")

    return fill


def publish(root: Path, step: int, value: float, **more) -> Path:
    """Publish weights in which all elements have one value."""
    return publish_weights(root, step, _model(value), **{"identity": ME, "dtype": "float32", **more})


def test_publish_read_verify(tmp_path):
    directory = publish(tmp_path, 7, 1.0)
    assert directory == tmp_path / "step_7"
    manifest = verify_weights(directory)
    assert (manifest.run_id, manifest.attempt, manifest.step, manifest.dtype) == ("run", 2, 7, "float32")
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.glob("*.safetensors")}
    assert manifest.files == digests
    lines = "".join(f"{name}:{digests[name]}\n" for name in sorted(digests))
    assert manifest.checksum == hashlib.sha256(lines.encode()).hexdigest()
    assert (directory / "config.json").exists()


def test_manifest_marks_an_adapter(tmp_path):
    model = publish(tmp_path, 1, 1.0)
    adapter = publish(tmp_path, 2, 1.0, adapter=True)
    assert [read_weights_manifest(directory).adapter for directory in (model, adapter)] == [False, True]


def test_newest_weights_ignores_other_attempts(tmp_path):
    assert newest_weights(tmp_path / "none", identity=ME) is None
    publish(tmp_path, 9, 1, identity=RunIdentity(run_id="run", attempt=1))
    publish(tmp_path, 8, 1, identity=RunIdentity(run_id="other", attempt=2))
    assert newest_weights(tmp_path, identity=ME) is None
    publish(tmp_path, 3, 1)
    (tmp_path / "step_4").mkdir()  # no manifest, so not published
    (tmp_path / ".step_5.tmp-1").mkdir()
    assert newest_weights(tmp_path, identity=ME) == (3, tmp_path / "step_3")
    assert newest_weights(tmp_path, identity=ME, above=2) == (3, tmp_path / "step_3")
    assert newest_weights(tmp_path, identity=ME, above=3) is None


def test_publishing_a_step_again_replaces_it(tmp_path):
    publish(tmp_path, 3, 1, identity=RunIdentity(run_id="run", attempt=1))
    publish(tmp_path, 3, 2)
    assert verify_weights(tmp_path / "step_3").attempt == 2


def test_damage_is_noticed(tmp_path):
    directory = publish(tmp_path, 1, 1)
    shard = directory / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    read_weights_manifest(directory)
    with pytest.raises(TransportError, match="model-00001-of-00002"):
        verify_weights(directory)
    shard.unlink()
    with pytest.raises(TransportError, match=r"incomplete: model-00001.* missing"):
        read_weights_manifest(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "x"}'])
def test_invalid_manifest_is_refused(tmp_path, content):
    directory = publish(tmp_path, 1, 1)
    (directory / "manifest.json").write_text(content)
    with pytest.raises(TransportError, match=r"manifest\.json"):
        read_weights_manifest(directory)
    assert newest_weights(tmp_path, identity=ME) is None


def test_changed_digest_is_refused(tmp_path):
    directory = publish(tmp_path, 1, 1)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model-00001-of-00002.safetensors"] = "0" * 64
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TransportError, match="checksum") as raised:
        read_weights_manifest(directory)
    assert raised.value.code == "BK-WEIGHTS-DAMAGED"


def test_weights_without_tensors_are_refused(tmp_path):
    with pytest.raises(TransportError, match=r"no \.safetensors"):
        publish_weights(tmp_path, 1, lambda d: None, identity=ME, dtype="float32")
    assert not (tmp_path / "step_1").exists()


def test_prune(tmp_path):
    for step in range(5):
        publish(tmp_path, step, 1)
    other = RunIdentity(run_id="another", attempt=1)
    publish(tmp_path, 7, 1, identity=other)
    prune_weights(tmp_path, ME.run_id, keep=lambda step: step in (0, 4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0", "step_4", "step_7"]
