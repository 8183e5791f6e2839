"""Upload a folder to the Hugging Face hub, and download large files with resumption."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import sha256_file, try_lock
from buckeye.errors import RunError, UsageError, first_line

HubKind = Literal["model", "dataset"]
PART = ".part"
"""Suffix of a file whose download is not complete."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Return True if `name` has the form ORG/NAME of a repository on the hub."""
    return _NAME.fullmatch(name) is not None


class HubRepository:
    """Repository `org/name`, which may not exist yet.

    `files` are its files, or None if it does not exist. `private` is True if the repository is private, or
    will be private when `push` creates it. Raise `UsageError` without a token, or if `private` is requested
    but the repository exists and is public. Raise `RunError` if the hub does not reply.
    """

    def __init__(self, name: str, kind: HubKind, *, private: bool) -> None:
        need("huggingface_hub", "Pushing to the Hugging Face hub")
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import RepositoryNotFoundError

        token = key("HF_TOKEN") or get_token()
        if token is None:
            raise UsageError(
                "pushing to the Hugging Face hub: no token with the right to write",
                code="BK-KEY-MISSING",
                hint="store one: `buckeye auth set HF_TOKEN` or `hf auth login`",
            )
        self.name, self._kind, self.private = name, kind, private
        self.files: list[str] | None = None
        self._api = HfApi(token=token)
        try:
            info: Any = self._api.repo_info(name, repo_type=kind)
        except RepositoryNotFoundError:
            return
        except Exception as error:
            message = f"request to the hub for {name} failed: {first_line(error)}"
            raise RunError(message, code="BK-HUB") from error
        self.files = sorted({file.rfilename for file in info.siblings or ()} - {".gitattributes"})
        self.private = bool(info.private)
        if private and not self.private:
            raise UsageError(
                f"--private: {name} exists and is public",
                code="BK-CLI-CONFLICT",
                hint="make it private on the hub, or choose another name",
            )

    @property
    def visibility(self) -> str:
        """Visibility of the repository as text, such as `existing, private`."""
        kind = "private" if self.private else "public"
        if self.files is not None:
            return f"existing, {kind}"
        return f"new, {kind}" + ("" if self.private else "; add --private to change that")

    def push(self, folder: Path, message: str, *, replaced: Sequence[str] = ()) -> str:
        """Upload the folder in one commit, and return the URL of the repository.

        If the repository does not exist, create it. Files of the repository that match a pattern in
        `replaced` and are not in the folder are deleted.
        """
        try:
            url = self._api.create_repo(self.name, repo_type=self._kind, private=self.private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.name,
                repo_type=self._kind,
                folder_path=folder,
                commit_message=message,
                delete_patterns=list(replaced),
            )
        except Exception as error:  # network, permissions, quota: the hub's errors vary
            raise RunError(
                f"pushing to {self.name} failed: {first_line(error)}",
                code="BK-HUB",
                hint="retry with the same command",
            ) from error
        return str(url)


def download_blob(name: str, kind: HubKind, commit: str, file: str, blobs: Path) -> None:
    """Download a file of a repository into the folder `blobs` of the hub's cache, and check its hash.

    `snapshot_download` then finds the file there. Unlike that function, this one resumes the download of an
    earlier process. Raises RunError if another process downloads the file, or if the hash is wrong, and
    errors of the hub's library.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    token = key("HF_TOKEN") or None
    url = hf_hub_url(name, file, repo_type=kind, revision=commit)
    found = get_hf_file_metadata(url, token=token)
    assert found.etag is not None, "the hub always sends it"
    blobs.mkdir(parents=True, exist_ok=True)
    part = blobs / f"{found.etag}{PART}"
    lock = try_lock(blobs / f".{found.etag}.lock")
    if lock is None:
        raise RunError(f"another process downloads {file} of {name}", code="BK-HUB", hint="wait for its end")
    try:
        if (blobs / found.etag).exists():
            return
        with part.open("ab") as handle:
            done = handle.tell()
            http_get(
                url, handle, resume_size=done, headers=build_hf_headers(token=token), expected_size=found.size
            )
            handle.flush()
            os.fsync(handle.fileno())
        if _SHA256.fullmatch(found.etag) and sha256_file(part) != found.etag:  # other files are small
            part.unlink()
            raise RunError(f"{file} of {name} is damaged: its hash is wrong", code="BK-HUB", hint="retry")
        part.rename(blobs / found.etag)
    finally:
        os.close(lock)
