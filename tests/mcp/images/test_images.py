"""Names, registries, logins and layers."""

import base64
import contextlib
import gzip
import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.mcp.images.oci import (
    INDEX,
    MANIFEST,
    Image,
    digest,
    directory,
    entry,
    fake_registry,
    hardlink,
    layer,
    symlink,
)

from buckeye.base.distribution import install_command
from buckeye.errors import UsageError
from buckeye.mcp.images.manifest import parse_reference
from buckeye.mcp.images.registry import find_login
from buckeye.mcp.images.store import fetch_image
from buckeye.mcp.images.unpack import unpack_layers
from buckeye.mcp.sandbox.runtime import PrepareError


@pytest.fixture(autouse=True)
def _no_logins(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path_factory.mktemp("docker")))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


SHA = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("busybox", ("registry-1.docker.io", "library/busybox", "latest")),
        ("docker.io/busybox:1", ("registry-1.docker.io", "library/busybox", "1")),
        ("hudpython/hud-text-2048:latest", ("registry-1.docker.io", "hudpython/hud-text-2048", "latest")),
        ("localhost/a", ("localhost", "a", "latest")),
        ("127.0.0.1:5000/org/env:v1.2", ("127.0.0.1:5000", "org/env", "v1.2")),
        (f"ghcr.io/org/env:tag@{SHA}", ("ghcr.io", "org/env", SHA)),
        (f"org/env@{SHA}", ("registry-1.docker.io", "org/env", SHA)),
    ],
)
def test_parse_reference_applies_defaults_of_docker(text, parts):
    reference = parse_reference(text)
    assert (reference.registry, reference.repository, reference.version) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-rm",
        "Org/Env",
        "org//env",
        "org/env:",
        "org/env:a b",
        "org/env@sha256:12",
        "http://x/y",
        "a/../b",
    ],
)
def test_parse_reference_refuses_invalid_names(text, refusal):
    with refusal(UsageError):
        parse_reference(text)


HELLO = layer(directory("app"), entry("app/hello", b"hello"))


def test_image_is_fetched_once_with_its_run_configuration(tmp_path):
    def unpacked_root(image):
        return tmp_path / "images" / digest(image.manifest).removeprefix("sha256:") / "root"

    image = Image(HELLO, Entrypoint=["/run"], Cmd=["--stdio"], Env=["A=1", "B=x=y"], WorkingDir="/app")
    with fake_registry() as registry:
        name = registry.add("org/env", image, indexed=True)
        made = fetch_image(name, tmp_path, owner=None)
        assert (made.root / "app" / "hello").read_bytes() == b"hello"
        assert made.argv == ("/run", "--stdio")
        assert made.variables == {"A": "1", "B": "x=y"}
        assert made.cwd == "/app"
        assert made.root == unpacked_root(image)
        registry.asked.clear()
        assert fetch_image(name, tmp_path, owner=None) == made
        assert not any("/blobs/" in path for path in registry.asked)
        by_digest = fetch_image(
            f"127.0.0.1:{registry.port}/org/env@{digest(image.manifest)}", tmp_path, owner=None
        )
        assert by_digest == made
        again = Image(HELLO, layer(entry("more")), Cmd=["x"])
        registry.add("org/env", again, indexed=True)
        registry.asked.clear()
        assert fetch_image(name, tmp_path, owner=None).root == unpacked_root(again)
        assert sum("/blobs/" in path for path in registry.asked) == 2  # the known layer is not fetched
    assert fetch_image(name, tmp_path, owner=None).root == unpacked_root(again)  # the registry is gone


@pytest.mark.parametrize("wishes", [{"WorkingDir": 5}, {"Cmd": "--stdio"}, {"Env": [["A", "1"]]}])
def test_invalid_run_configuration_is_refused(tmp_path, wishes, refusal):
    with fake_registry() as registry, refusal(PrepareError):
        fetch_image(registry.add("org/env", Image(HELLO, **wishes)), tmp_path, owner=None)


def test_token_is_fetched_from_server_of_challenge(tmp_path, refusal):
    with fake_registry() as registry:
        registry.token = "t0ken"
        name = registry.add("org/env", Image(HELLO))
        fetch_image(name, tmp_path, owner=None)
        asked = next(path for path in registry.asked if path.startswith("/token"))
        assert "service=fake" in asked
        assert "scope=repository%3Aorg%2Fenv%3Apull" in asked
        registry.login = "Basic nobody-has-this"
        with refusal(PrepareError):
            fetch_image(registry.add("org/other", Image(HELLO)), tmp_path, owner=None)


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_damaged_downloads_are_refused(tmp_path, refusal):
    image = Image(HELLO)
    with fake_registry() as registry:
        name = registry.add("org/env", image, indexed=True)
        kept = dict(registry.blobs), dict(registry.manifests)
        for place in registry.blobs:
            for damage in (flipped, lambda data: data + b"x", lambda data: data[:-1]):
                registry.blobs = kept[0] | {place: damage(kept[0][place])}
                with pytest.raises(PrepareError, match="is damaged"):
                    fetch_image(name, tmp_path, owner=None)
        registry.blobs = kept[0]
        ours = f"org/env:{digest(image.manifest)}"
        registry.manifests[ours] = (kept[1][ours][0], image.manifest + b" ")
        with refusal(PrepareError):
            fetch_image(name, tmp_path, owner=None)
        registry.manifests = kept[1]
        assert not list(tmp_path.glob("images/[!.]*"))
        fetch_image(name, tmp_path, owner=None)


MANIFESTS = {
    "text": "hello",
    "old": '{"schemaVersion": 1}',
    "half": '{"layers": [], "config": {}}',
    "evil": '{"layers": [{"digest": "sha256:../../x", "size": 1}], "config": {"digest": "x", "size": 1}}',
    "list": '{"layers": 3}',
    "array": "[]",
}


@pytest.mark.parametrize("tag", ["missing", *MANIFESTS])
def test_invalid_manifests_are_refused(tmp_path, tag, refusal):
    with fake_registry() as registry:
        for name, content in MANIFESTS.items():
            registry.manifests[f"org/env:{name}"] = (MANIFEST, content.encode())
        with refusal(PrepareError):
            fetch_image(f"127.0.0.1:{registry.port}/org/env:{tag}", tmp_path, owner=None)


def test_image_for_other_platform_is_refused(tmp_path):
    index = json.dumps({"manifests": [{"digest": SHA, "platform": {"os": "linux", "architecture": "mips"}}]})
    with fake_registry() as registry:
        registry.manifests["org/env:latest"] = (INDEX, index.encode())
        with pytest.raises(PrepareError, match="linux/mips"):
            fetch_image(f"127.0.0.1:{registry.port}/org/env", tmp_path, owner=None)


def test_layer_with_other_digest_is_refused(tmp_path, refusal):
    image = Image(HELLO)
    manifest = json.loads(image.manifest)
    config = json.loads(image.blobs[manifest["config"]["digest"]])
    config["rootfs"]["diff_ids"] = [SHA]
    raw = json.dumps(config).encode()
    image.blobs[digest(raw)] = raw
    manifest["config"] |= {"digest": digest(raw), "size": len(raw)}
    image.manifest = json.dumps(manifest).encode()
    with fake_registry() as registry, refusal(PrepareError):
        fetch_image(registry.add("org/env", image), tmp_path, owner=None)


def test_find_login_reads_config_of_docker(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    auth = base64.b64encode(b"me:pass:word").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"ghcr.io": {"auth": auth}}}))
    assert find_login("ghcr.io") == {"authorization": f"Basic {auth}"}
    assert find_login("other.io") == {}


def unpacked(folder, *layers):
    folder.mkdir(exist_ok=True)
    paths = []
    for number, data in enumerate(layers):
        path = folder.parent / f"{folder.name}-{number}.tar"
        path.write_bytes(data)
        paths.append(path)
    return unpack_layers(paths, [digest(data) for data in layers], folder, owner=None)


def tree(folder):
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_unpack_applies_layers_in_order(tmp_path):
    root = tmp_path / "root"
    first = layer(
        *(directory(name) for name in ("etc", "opt", "gone")),
        *(entry(name, b"1") for name in ("etc/a", "etc/b", "opt/x", "gone/y")),
    )
    hidden = (entry(name) for name in ("etc/.wh.b", ".wh.gone", "opt/.wh..wh..opq"))
    second = layer(entry("etc/a", b"2"), entry("opt/new", b"2"), *hidden)
    unpacked(root, first, second, layer(entry("pipe", kind=tarfile.FIFOTYPE)))
    assert tree(root) == {"etc/a": "2", "opt/new": "2"}
    assert not (root / "gone").exists()
    assert not (root / "pipe").exists()


def test_unpack_resolves_links_inside_tree(tmp_path):
    root = tmp_path / "root"
    unpacked(
        root,
        layer(
            directory("usr/lib"),
            symlink("lib", "usr/lib"),
            entry("lib/libc", b"c"),  # through the link, as in a container
            symlink("abs", "/usr"),
            entry("abs/share/doc", b"d"),
            symlink("up", "../../../usr"),
            entry("up/u", b"u"),
            hardlink("usr/lib/same", "lib/libc"),
        ),
    )
    assert tree(root) == {
        "lib": "usr/lib",
        "abs": "/usr",
        "up": "../../../usr",
        "usr/lib/libc": "c",
        "usr/lib/same": "c",
        "usr/share/doc": "d",
        "usr/u": "u",
    }
    assert (root / "usr/lib/same").stat().st_ino == (root / "usr/lib/libc").stat().st_ino


def test_layer_with_garbage_after_end_is_refused(tmp_path):
    packed = gzip.compress(HELLO + bytes(100_000), compresslevel=0)
    path = tmp_path / "layer"
    path.write_bytes(packed[:-50_000] + b"\xff" * 50_000)
    (tmp_path / "root").mkdir()
    with pytest.raises(PrepareError, match="layer 1"):
        unpack_layers([path], [digest(HELLO)], tmp_path / "root", owner=None)


def test_unpack_reads_zstd_layers(tmp_path, monkeypatch):
    packed = zstandard.ZstdCompressor().compress(HELLO[:700]) + zstandard.compress(HELLO[700:])  # two frames
    path, root = tmp_path / "layer", tmp_path / "root"
    for data, says in ((packed, None), (packed[:-9], "layer 1"), (packed[:20] + b"\xff" * 40, "layer 1")):
        root.mkdir()
        path.write_bytes(data)
        if says is None:
            unpack_layers([path], [digest(HELLO)], root, owner=None)
            assert tree(root) == tree_of_hello(tmp_path)
        else:
            with pytest.raises(PrepareError, match=says):
                unpack_layers([path], [digest(HELLO)], root, owner=None)
        shutil.rmtree(root)
    root.mkdir()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(PrepareError, match=re.escape(install_command("zstd"))):
        unpack_layers([path], [digest(HELLO)], root, owner=None)


def tree_of_hello(tmp_path):
    unpacked(tmp_path / "plain", HELLO)
    return tree(tmp_path / "plain")


names = st.lists(st.sampled_from(["a", "b", "..", ".", "/", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4)
members = st.builds(
    lambda name, link, kind: entry(
        "/".join(name), b"x" if kind == tarfile.REGTYPE else b"", kind=kind, link="/".join(link)
    ),
    names,
    names,
    st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]),
)


@given(layers=st.lists(st.lists(members, max_size=6), max_size=3))
def test_unpack_writes_only_inside_root(layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    for name in ("a", "b"):
        (folder / name).write_text("unhurt")
    with contextlib.suppress(PrepareError):
        unpacked(folder / "root", *(layer(*entries) for entries in layers))
    assert {path.name for path in folder.iterdir() if path.suffix != ".tar"} == {"a", "b", "root"}
    assert (folder / "a").read_text() == (folder / "b").read_text() == "unhurt"
    for parent, folders, files in os.walk(folder / "root"):
        assert Path(parent).resolve().is_relative_to((folder / "root").resolve()), (folders, files)
