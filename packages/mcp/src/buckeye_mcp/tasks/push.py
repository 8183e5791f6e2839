"""A folder of tasks as a dataset on the Hugging Face hub. HF_ENDPOINT names another hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.errors import RunError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_MADE_BY_THE_HUB = {".gitattributes"}


class DatasetRepository:
    """The dataset repository `org/name`, which may not exist yet. `files` are those in it, None if it does
    not exist; `private` is what it is, or will be.

    Raises UsageError without a token, and for a public one where a private one is asked for; RunError if the
    hub does not answer.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        need("huggingface_hub", "Pushing to the Hugging Face hub")
        from huggingface_hub import HfApi, get_token

        token = key("HF_TOKEN") or get_token()
        if token is None:
            raise UsageError(
                "pushing needs a token that may write: `buckeye auth set HF_TOKEN`, or `hf auth login`. "
                "With --no-push the dataset stays here."
            )
        self.name = name
        self._api = HfApi(token=token)
        info = self._info()
        self.private = private if info is None else bool(info.private)
        self.files: list[str] | None = None if info is None else self._files()
        if private and not self.private:
            raise UsageError(
                f"--private: {name} is there already, and public. Make it private on the hub, or choose "
                "another --name."
            )

    @property
    def visibility(self) -> str:
        """Who will see what is pushed."""
        kind = "private" if self.private else "public"
        if self.files is not None:
            return f"there already, {kind}"
        return f"new, {kind}" + ("" if self.private else "; --private changes that")

    def push(self, folder: Path) -> str:
        """Upload the folder in one commit, create the repository if need be, and return the address. Data
        files that are not in the folder are removed."""
        try:
            url = self._api.create_repo(self.name, repo_type="dataset", private=self.private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.name,
                repo_type="dataset",
                folder_path=folder,
                commit_message="Tasks written by Buckeye",
                delete_patterns="data/*.parquet",
            )
        except Exception as error:  # network, rights, quota: one message whatever the library raises
            raise RunError(
                f"pushing to {self.name} failed: {_reason(error)}\nThe same command tries it again."
            ) from error
        return str(url)

    def _info(self) -> Any:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self._api.dataset_info(self.name)
        except RepositoryNotFoundError:
            return None
        except Exception as error:
            raise RunError(f"the hub could not be asked for {self.name}: {_reason(error)}") from error

    def _files(self) -> list[str]:
        try:
            files = self._api.list_repo_files(self.name, repo_type="dataset")
        except Exception as error:
            raise RunError(f"the hub could not be asked for {self.name}: {_reason(error)}") from error
        return sorted(set(files) - _MADE_BY_THE_HUB)


def check_name(name: str, *, push: bool) -> None:
    """Raises UsageError for a name that the hub would refuse, or that names no folder."""
    if push and not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name}: write the name of a dataset on the hub as ORG/NAME, or add --no-push"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", name, re.ASCII):
        raise UsageError(f"--name {name}: use letters, digits, hyphens, dots, and at most one slash")


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
