"""Digests of weights files: in parts, equal for a file and its content."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.transport import weights_digest
from buckeye.transport.weights_digest import digest_contents, digest_files


def sha256(content):
    return hashlib.sha256(content).digest()


def test_digest_of_a_small_file_is_its_sha256(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert digest_files([path]) == [sha256(b"abc").hex()]
    assert digest_files([]) == []
    with pytest.raises(FileNotFoundError):
        digest_files([path, tmp_path / "b"])


@given(
    contents=st.lists(st.binary(max_size=40), max_size=5), part=st.integers(1, 20), block=st.integers(1, 9)
)
def test_digest_of_a_large_file_is_that_of_its_parts(tmp_path_factory, contents, part, block):
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_digest, "PART_BYTES", part)
        patch.setattr(weights_digest, "_BLOCK_BYTES", block)
        parts = [[c[i : i + part] for i in range(0, max(len(c), 1), part)] for c in contents]
        expected = [sha256(p[0]) if len(p) == 1 else sha256(b"".join(map(sha256, p))) for p in parts]
        assert digest_files(paths) == [digest.hex() for digest in expected]
        by_name = {path.name: memoryview(content) for path, content in zip(paths, contents, strict=True)}
        assert list(digest_contents(by_name).values()) == [digest.hex() for digest in expected]
