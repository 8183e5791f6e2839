"""An exported model on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from buckeye.errors import RunError, UsageError
from buckeye.tasks.keys import key

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_MADE_BY_THE_HUB = {".gitattributes"}


class Hub:
    """A model repository `org/name` that is to be filled, and made, `private` or public, if it is not there.
    Raises UsageError, before anything is exported, for
    a name that is none, without a token in HF_TOKEN, and for a repository that already has files."""

    def __init__(self, name: str, *, private: bool) -> None:
        from huggingface_hub import HfApi

        if not _NAME.fullmatch(name):
            raise UsageError(f"--push {name}: write the name of a model repository as ORG/NAME")
        token = key("HF_TOKEN")
        if not token:
            raise UsageError("--push needs a token that may write: `buckeye auth set HF_TOKEN`")
        self.name = name
        self._private = private
        self._api = HfApi(token=token)
        self._there = self._refuse_used()

    @property
    def visibility(self) -> str:
        """Who will see what is uploaded."""
        if self._there:
            return "which exists, and stays as private or public as it is"
        return "a new private repository" if self._private else "a new public one; --private changes that"

    def upload(self, directory: Path) -> str:
        """Create the repository, upload every file of a directory in one commit, and return the address."""
        try:
            url = self._api.create_repo(self.name, exist_ok=True, private=self._private)
            self._api.upload_folder(
                repo_id=self.name, folder_path=directory, commit_message="Model exported by Buckeye"
            )
        except Exception as error:  # network, rights, quota: one message whatever the library raises
            raise RunError(
                f"The model is complete in {directory}; uploading it to {self.name} failed: "
                f"{_reason(error)}\n"
                "The same command tries the upload again."
            ) from error
        return str(url)

    def _refuse_used(self) -> bool:
        """Whether the repository exists; one that does is empty."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            files: list[Any] = self._api.list_repo_files(self.name)
        except RepositoryNotFoundError:
            return False
        except Exception as error:
            raise RunError(f"The hub could not be asked for {self.name}: {_reason(error)}") from error
        if set(files) - _MADE_BY_THE_HUB:
            raise UsageError(
                f"--push {self.name}: this repository has files already, and nothing is overwritten. "
                "Choose another name."
            )
        return True


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
