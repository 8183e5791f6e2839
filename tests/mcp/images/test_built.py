"""Locally built images: the store, the mirror and the choice of a builder."""

import hashlib
import json
import sys

import pytest
from tests.mcp.images.oci import MANIFEST, Image, digest, entry, fake_registry, layer

from buckeye.errors import UsageError
from buckeye.mcp.images.local_layouts import built_layout, find_built, keep_layout, layout_blob
from buckeye.mcp.images.manifest import parse_reference
from buckeye.mcp.images.store import fetch_image
from buckeye.mcp.sandbox.build import build_image, choose_builder, push_image
from buckeye.mcp.sandbox.runtime import PrepareError, RuntimeUnavailableError

NAME = parse_reference("my-org/my-env:latest")


@pytest.fixture
def bin(tmp_path, monkeypatch):
    """Empty directory that is the whole PATH, to put programs into."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def program(folder, name, lines):
    """Write a Python program that appends its arguments to the file `calls`."""
    head = f"#!{sys.executable}\nimport sys, json, pathlib\nwords = sys.argv[1:]\n"
    note = f"with open({str(folder / 'calls')!r}, 'a') as f: f.write(' '.join(words) + chr(10))\n"
    (folder / name).write_text(head + note + lines)
    (folder / name).chmod(0o755)


def layout(folder, image):
    """Write the image as an OCI layout."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for data in (*image.blobs.values(), image.manifest):
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
    described = {"mediaType": MANIFEST, "digest": digest(image.manifest), "size": len(image.manifest)}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    return folder


def test_built_image_is_unpacked_without_registry(tmp_path):
    image = Image(layer(entry("hello", b"hi")), Cmd=["/hello"])
    store = tmp_path / "store"
    kept = keep_layout(layout(tmp_path / "layout", image), NAME, store)
    assert kept.digest == digest(image.manifest)
    made = fetch_image(str(NAME), store, owner=None)
    assert (made.root / "hello").read_bytes() == b"hi"
    assert made.argv == ("/hello",)
    again = Image(layer(entry("hello", b"again")), Cmd=["/hello"])
    keep_layout(layout(tmp_path / "second", again), NAME, store)
    made = fetch_image(str(NAME), store, owner=None)
    assert (made.root / "hello").read_bytes() == b"again"
    lost = next(iter(find_built(NAME, store).layers))
    layout_blob(built_layout(NAME, store), lost.digest).unlink()
    assert find_built(NAME, store) is None


@pytest.mark.parametrize("damage", ["index", "manifest", "blob"])
def test_invalid_layout_is_refused(tmp_path, damage):
    image = Image(layer(entry("hello", b"hi")), Cmd=["/hello"])
    place = layout(tmp_path / "layout", image)
    blobs = place / "blobs" / "sha256"
    if damage == "index":
        (place / "index.json").write_text('{"manifests": []}')
    elif damage == "manifest":
        (blobs / digest(image.manifest).removeprefix("sha256:")).write_text("{}")
    else:
        (blobs / next(iter(image.blobs)).removeprefix("sha256:")).unlink()
    with pytest.raises(PrepareError, match="builder's output"):
        keep_layout(place, NAME, tmp_path / "store")
    assert find_built(NAME, tmp_path / "store") is None


def test_mirror_variable_replaces_docker_hub(tmp_path, monkeypatch):
    with fake_registry() as registry:
        registry.add("library/my-env", Image(layer(entry("hello", b"hi")), Cmd=["/hello"]))
        monkeypatch.setenv("BUCKEYE_REGISTRY_MIRROR", f"127.0.0.1:{registry.port}")
        made = fetch_image("my-env:latest", tmp_path, owner=None)
        assert (made.root / "hello").read_bytes() == b"hi"
        assert registry.asked[0] == "/v2/library/my-env/manifests/latest"


def test_auto_builder_is_first_that_works(bin, refusal):
    with refusal(RuntimeUnavailableError):
        choose_builder()
    program(bin, "docker", "sys.exit('no daemon')\n")
    program(bin, "buildah", "")
    assert choose_builder() == "buildah"
    program(bin, "podman", "")
    assert choose_builder() == "podman"
    with pytest.raises(RuntimeUnavailableError, match="no daemon"):
        choose_builder("docker")


def test_docker_builds_tags_and_pushes(bin, tmp_path):
    digests = json.dumps(["other@sha256:" + "1" * 64, "ghcr.io/my-org/my-env@sha256:" + "2" * 64])
    program(bin, "docker", f"if '--format' in sys.argv: print({digests!r})\n")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    assert build_image(tmp_path, "my-env:latest") == ""
    pushed = push_image("my-env:latest", "ghcr.io/my-org/my-env:1", progress=lambda _: None)
    assert pushed == "sha256:" + "2" * 64
    calls = [line for line in (bin / "calls").read_text().splitlines() if line != "version"]
    assert calls[0] == f"build --tag my-env:latest {tmp_path}"
    assert calls[2] == "tag my-env:latest ghcr.io/my-org/my-env:1"
    assert calls[3] == "push --quiet ghcr.io/my-org/my-env:1"


def test_buildah_pushes_image_that_it_built(bin, tmp_path):
    digest = "sha256:" + "3" * 64
    note = f"    pathlib.Path(words[words.index('--digestfile') + 1]).write_text({digest!r})\n"
    program(bin, "buildah", f"if words[0] == 'push':\n{note}")
    pushed = push_image("my-env:latest", "127.0.0.1:5000/my-org/my-env:1", progress=lambda _: None)
    assert pushed == digest
    calls = [line for line in (bin / "calls").read_text().splitlines() if line != "version"]
    assert calls[:2] == [
        "inspect --type image my-env:latest",
        "tag my-env:latest 127.0.0.1:5000/my-org/my-env:1",
    ]
    assert calls[2].startswith("push --quiet --tls-verify=false --digestfile ")  # plain HTTP to this machine
    push_image("my-env:latest", "ghcr.io/my-org/my-env:1", progress=lambda _: None)
    assert "--tls-verify" not in (bin / "calls").read_text().splitlines()[-1]


def test_failed_build_error_has_last_output(bin, tmp_path):
    program(bin, "docker", "sys.exit(words[0] == 'build' and 'step 3 of 7: no such file')\n")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(PrepareError, match="step 3 of 7"):
        build_image(tmp_path, "my-env:latest")


def test_push_refuses_unnamed_registry_and_unknown_image(bin, refusal):
    with pytest.raises(UsageError, match=r"ghcr\.io/my-org/my-env:latest"):
        push_image("my-env:latest", "my-env:latest", progress=lambda _: None)
    with refusal(UsageError):
        push_image("my-env:latest", "ghcr.io/o/my-env:latest", progress=lambda _: None)
