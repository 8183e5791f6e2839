"""Upload a folder to a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.errors import RunError, UsageError, first_line

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

    def __init__(self, name: str, kind: Literal["dataset", "model"], *, private: bool) -> None:
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
