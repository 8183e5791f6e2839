"""An image that is unpacked changes nothing outside its folder and does not exhaust memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests.mcp.images.oci import dated, directory, entry, hardlink, layer, sparse, symlink
from tests.places import ROOT
from tests.whole.security.surroundings import Surroundings

MOST_MEMORY_KIB = 300 * 1024
NOBODY = 65534
# Paths of the victim from the root of an image, and from a folder in it.
OUT = "../../victim"


def device(name, kind):
    info, content = entry(name, kind=kind)
    info.devmajor, info.devminor = 1, 3
    return info, content


def extended(name, **fields):
    info, content = entry(name)
    info.pax_headers = fields
    return info, content


def declared(size, kind=tarfile.XHDTYPE, name="x"):
    """Return a header that declares `size` bytes, without content."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT)


@dataclass(frozen=True)
class Zeros:
    """Header followed by `size` zeros."""

    header: bytes
    size: int

    def pieces(self):
        yield self.header
        for _ in range(self.size // 2**20 + 1):
            yield bytes(2**20)


def chain(number):
    """Return `number` extended headers in a row, each for the next one."""
    one = declared(10) + b"9 a=bcde\n\n".ljust(512, b"\0")
    return one * number + layer(entry("x"))


def raw(name, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo("x")
    info.type = kind
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[: len(name)] = name
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


HOSTILE = {
    "modes_through_a_later_link": layer(
        directory("a"), entry("a/authorized_keys", b"x", mode=0o777), symlink("a", f"{OUT}/.ssh")
    ),
    "folder_mode_below_a_later_link": layer(
        directory("a"), directory("a/.ssh", 0o777), entry("a/.ssh/authorized_keys", b"x"), symlink("a", OUT)
    ),
    "folder_mode_through_a_later_link": layer(directory("a", 0o1777), symlink("a", f"{OUT}/.ssh")),
    "file_through_a_link": layer(symlink("a", OUT), entry("a/.ssh/authorized_keys", b"theirs")),
    "file_through_an_absolute_link": layer(symlink("a", "{victim}"), entry("a/new", b"theirs")),
    "file_through_links_of_links": layer(
        symlink("a", "b/c"), directory("b"), symlink("b/c", f"../{OUT}"), entry("a/new", b"x")
    ),
    "folder_over_a_link": layer(symlink("a", OUT), directory("a", 0o777), entry("a/new", b"x")),
    "file_over_a_link": layer(symlink("a", f"{OUT}/.ssh/authorized_keys"), entry("a", b"x", mode=0o777)),
    "links_in_a_ring": layer(symlink("a", "b"), symlink("b", "a"), entry("a/x", b"x")),
    "hard_link_to_outside": layer(hardlink("a", f"{OUT}/.ssh/authorized_keys")),
    "hard_link_to_an_absolute_path": layer(hardlink("a", "{victim}/.ssh/authorized_keys"), entry("a", b"x")),
    "hard_link_through_a_link": layer(
        symlink("a", OUT), hardlink("b", "a/.ssh/authorized_keys"), entry("b", b"x", mode=0o777)
    ),
    "hard_link_to_a_link": layer(symlink("a", f"{OUT}/.ssh/authorized_keys"), hardlink("b", "a")),
    "whiteout_through_a_link": layer(symlink("a", OUT), entry("a/.wh..ssh")),
    "whiteout_of_the_folder_above": layer(directory("a"), entry("a/.wh...")),
    "opaque_through_a_link": layer(symlink("a", OUT), entry("a/.wh..wh..opq")),
    "names_that_lead_up": layer(entry("../victim/new", b"x"), entry("a/../../victim/new", b"x")),
    "absolute_names": layer(entry("/etc/x", b"x"), entry("{victim}/new", b"x"), directory("/", 0o777)),
    "devices_and_pipes": layer(
        device("null", tarfile.CHRTYPE), device("disk", tarfile.BLKTYPE), device("pipe", tarfile.FIFOTYPE)
    ),
    "set_user_id": layer(entry("su", b"x", mode=0o6777), directory("d", 0o7777)),
    "sparse_by_extension": layer(sparse("x", 2**50)),
    "sparse_of_old": Zeros(declared(512, tarfile.GNUTYPE_SPARSE), 512),
    "long_extended_header": Zeros(declared(310 * 2**20), 310 * 2**20),
    "long_header_for_all_files": Zeros(declared(310 * 2**20, tarfile.XGLTYPE), 310 * 2**20),
    "long_name": Zeros(declared(310 * 2**20, tarfile.GNUTYPE_LONGNAME), 310 * 2**20),
    "headers_without_end": chain(20_000),
    "extended_path_that_leads_up": layer(extended("x", path="../../victim/new")),
    "extended_size": layer(extended("x", size=str(2**60))),
    "extended_link_that_leads_out": layer(extended("x", linkpath="{victim}")),
    "times_that_are_none": layer(dated("x", "nan"), dated("y", "1e400"), dated("z", "-9e18")),
    "names_that_a_terminal_obeys": layer(
        entry("\x1b]0;x\x07"), entry("a\nb"), entry("\u202egol"), entry("é\u0301")
    ),
    "names_that_are_no_text": raw(b"\xff\xfe\x80/x"),
    "deep": layer(entry("/".join(["a"] * 5000))),
    "deep_by_links": layer(
        directory("/".join("a" * 150)), symlink("b", "/".join("a" * 150)), entry("b/" * 150 + "x")
    ),
    "long_names": layer(entry("a" * 300)),
    "file_then_folder_then_link": layer(
        entry("a", b"x"),
        directory("a"),
        entry("a/b", b"x"),
        symlink("a", OUT),
        directory("a"),
        entry("a/c", b"x"),
    ),
    "bomb": Zeros(declared(600 * 2**20, tarfile.REGTYPE), 600 * 2**20),
    "half": layer(entry("a", b"x" * 5000))[:2000],
    "nothing": b"",
    "noise": os.urandom(4096),
}
REFUSED = """
    links_in_a_ring hard_link_to_outside hard_link_to_an_absolute_path hard_link_through_a_link
    hard_link_to_a_link names_that_lead_up whiteout_of_the_folder_above sparse_by_extension
    sparse_of_old long_extended_header long_header_for_all_files long_name headers_without_end
    extended_path_that_leads_up extended_size times_that_are_none nothing deep deep_by_links long_names
    bomb half noise
"""


def victimised(data: bytes, victim: Path) -> bytes:
    """Return the layer with the victim's path in its headers."""
    if b"{victim}" not in data:
        return data
    result = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=result, mode="w") as new:
        for member in old:
            member.name = member.name.replace("{victim}", str(victim))
            member.linkname = member.linkname.replace("{victim}", str(victim))
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return result.getvalue()


@cache
def packed_zeros(zeros):
    """Return the compressed layer and its digest."""
    packed, digest = io.BytesIO(), hashlib.sha256()
    with gzip.open(packed, "wb", 1) as layer:
        for piece in zeros.pieces():
            layer.write(piece)
            digest.update(piece)
    return packed.getvalue(), digest.hexdigest()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("as who runs the tests", marks=pytest.mark.smoke),
        pytest.param("as nobody", marks=pytest.mark.e2e),
    ],
)
def unpacked(request, tmp_path_factory):
    """The surroundings and the result of each layer, all unpacked in one process."""
    if request.param == "as nobody" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = tmp_path_factory.mktemp("images")
    around = Surroundings(folder)
    work = folder / "store"
    work.mkdir()
    for name, data in HOSTILE.items():
        if isinstance(data, Zeros):
            layer, digest = packed_zeros(data)
        else:
            there = victimised(data, around.victim)
            layer, digest = gzip.compress(there), hashlib.sha256(there).hexdigest()
        (work / f"{name}.layer").write_bytes(layer)
        (work / f"{name}.digest").write_text(f"sha256:{digest}")
    uid = os.getuid()
    if request.param == "as nobody":
        uid = NOBODY
        os.chown(work, NOBODY, NOBODY)
        for path in (folder, *list(folder.parents)[:3]):
            if path.stat().st_uid == 0 and str(path).startswith("/tmp/"):
                path.chmod(path.stat().st_mode | 0o755)
    argv = [sys.executable, "-m", "tests.whole.security.unpacking", str(work), str(uid)]
    printed = subprocess.check_output(argv, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in printed.splitlines()]
    return around, work, {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_layer_is_laid_inside_or_refused_in_words(unpacked, name):
    _, work, results = unpacked
    error = results[name]["error"]
    if name in REFUSED.split():
        assert error.startswith("layer 1")
        assert error.isprintable()
        assert len(error) < 500
    else:
        assert error is None
    for path in (work / f"{name}.root").rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        assert stat.S_ISLNK(mode) or mode & (stat.S_ISUID | stat.S_ISGID) == 0


def test_nothing_outside_is_touched(unpacked):
    around, work, _ = unpacked
    assert around.untouched()
    allowed = {f"{name}.{kind}" for name in HOSTILE for kind in ("layer", "digest", "root")}
    assert {path.name for path in work.iterdir()} == allowed


def test_memory_stays_small(unpacked):
    _, _, results = unpacked
    assert max(line["peak_kib"] for line in results.values()) < MOST_MEMORY_KIB
