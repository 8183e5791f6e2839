"""Download everything that a run needs, so that the run needs no network."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from buckeye.base.disk import free_bytes, human_bytes, reserve_bytes, size_of
from buckeye.base.distribution import need
from buckeye.base.hub import PART, HubKind, download_blob
from buckeye.base.keys import key
from buckeye.config.adapter import is_adapter, read_base_model
from buckeye.config.environments import EnvConfig
from buckeye.config.rl import RLConfig
from buckeye.dataset.requirements import is_dataset_environment
from buckeye.dataset.rows import split_subset
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import BuckeyeError, DiskFullError, EnvironmentNotFoundError, UsageError, first_line
from buckeye.launch.mcp_gateways import dataset_names, gateway_images
from buckeye.launch.preflight.model import MODEL_FILES, cached_revision, find_model, refuse_path
from buckeye.launch.preflight.model_files import check_model_files
from buckeye.launch.preflight.task_checks import check_tasks
from buckeye.launch.run_keys import rollout_environments
from buckeye.mcp.sandbox.container_runtimes import image_runtime
from buckeye.mcp.sandbox.runtime import SandboxLimits
from buckeye.mcp.tasks.dataset import downloaded_dataset, hub_files, is_hub_dataset
from buckeye.workers.installed.install import InstallRequest, install_environment
from buckeye.workers.installed.install_source import parse_source
from buckeye.workers.installed.store import find_installed
from buckeye.workers.loading import find_interpreter, package_name

Kind = Literal["model", "dataset", "environment", "image"]
Progress = Callable[[str], None]
_POLL_SECONDS = 0.5
_LARGE_BYTES = 100_000  # of files whose download an interrupted process resumes


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedItem:
    """Part of a run that is now on this machine.

    `size` is its size on disk in bytes, or None if another program stores it. `downloaded` is False if it was
    on this machine before.
    """

    kind: Kind
    name: str
    path: str
    size: int | None
    downloaded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Repository:
    """Repository on the Hugging Face hub, with the files to download.

    `large` has the commit and path of each missing large file. `missing` is the number of missing bytes.
    """

    kind: HubKind
    name: str
    revision: str | None
    patterns: Sequence[str]
    large: Sequence[tuple[str, str]]
    missing: int

    @property
    def folder(self) -> Path:
        """Folder in the cache that has the repository's files."""
        return _cache_folder(self.kind, self.name)


def fetch_run(
    config: RLConfig, *, sources: Sequence[str], index: str | None, progress: Progress
) -> Iterator[FetchedItem]:
    """Download the models, datasets, environments and images of a run; yield each one that is present.

    `sources` name the packages of environments that are not in a package index, as for `buckeye env install`.
    `index` is an additional package index. A repeated call resumes downloads. Raises UsageError for something
    that cannot be downloaded, and DiskFullError before the first download if the files do not fit.
    """
    environments = rollout_environments(config)
    repositories: list[_Repository] = []
    for found in [*_models(config, progress), *_datasets(environments, progress)]:
        if isinstance(found, FetchedItem):
            yield found
        else:
            repositories.append(found)
    _check_room(repositories)
    for repository in repositories:
        yield _download(repository, progress)
    yield from _environments(environments, sources, index, progress)
    yield from _images(environments, progress)
    progress("loading the environments")  # a third-party environment may download its own data
    for check in check_tasks(config, None):
        if check.state == "failed":
            raise UsageError(check.line, code=check.code)


def _models(config: RLConfig, progress: Progress) -> Iterator[FetchedItem | _Repository]:
    names = [config.trainer.model.name, config.trainer.loss.reference_model]
    for name in dict.fromkeys(filter(None, names)):
        revision = None
        if is_adapter(name):
            yield _local("model", name)
            name, revision = read_base_model(Path(name))
        path = find_model(name, revision)
        if path is not None and cached_revision(path) is None:
            yield _local("model", name)
            continue
        refuse_path(name)
        progress(f"looking up {name} on the Hugging Face hub")
        yield _look_up("model", name, revision, lambda: MODEL_FILES, path)


def _datasets(environments: Sequence[EnvConfig], progress: Progress) -> Iterator[FetchedItem | _Repository]:
    sources = [
        str(env.args[name])
        for env in environments
        if is_dataset_environment(env.id)
        for name in ("path", "eval_path")
        if env.args.get(name) is not None
    ]
    for source in dict.fromkeys([*sources, *dataset_names(environments)]):
        name, subset = split_subset(source)
        if is_hub_dataset(name):
            progress(f"looking up {name} on the Hugging Face hub")
            cached = None
            with suppress(UsageError):
                cached = downloaded_dataset(name, subset)
            yield _look_up("dataset", name, None, partial(hub_files, name, subset), cached)
        elif Path(os.path.expanduser(source)).exists():
            yield _local("dataset", source)


def _local(kind: HubKind, name: str) -> FetchedItem:
    path = Path(os.path.expanduser(name)).resolve()
    return FetchedItem(kind=kind, name=name, path=str(path), size=size_of(path), downloaded=False)


def _look_up(
    kind: HubKind,
    name: str,
    revision: str | None,
    patterns: Callable[[], Sequence[str]],
    cached: Path | None,
) -> FetchedItem | _Repository:
    """Return the files that must be downloaded. If the hub is unreachable, return the complete copy `cached`.

    `patterns` returns the files of the repository that a run reads.
    """
    need("huggingface_hub", f"{name}, of the Hugging Face hub,")
    from huggingface_hub import snapshot_download

    try:
        chosen = patterns()
        token: Any = key("HF_TOKEN") or None
        files = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(chosen), token=token, dry_run=True
        )
    except UsageError:
        raise
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        if cached is None:
            raise _hub_error(kind, name, error) from None
        size = size_of(_cache_folder(kind, name) / "blobs")
        return FetchedItem(kind=kind, name=name, path=str(cached), size=size, downloaded=False)
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    partial = sum(size_of(path) for path in (_cache_folder(kind, name) / "blobs").glob(f"*{PART}"))
    large = [
        (file.commit_hash, file.filename)
        for file in files
        if file.will_download and (file.file_size or 0) >= _LARGE_BYTES
    ]
    return _Repository(
        kind=kind,
        name=name,
        revision=revision,
        patterns=chosen,
        large=large,
        missing=max(0, missing - partial),
    )


def _hub_error(kind: str, name: str, error: Exception) -> UsageError:
    return UsageError(
        f"cannot fetch the {kind} {name} from the Hugging Face hub: {first_line(error)}",
        code="BK-MODEL-NOT-FOUND" if kind == "model" else "BK-DATA-NOT-FOUND",
        hint="check the name and the network, and repeat the command: it resumes; a gated repository needs "
        "HF_TOKEN",
    )


def _cache_folder(kind: str, name: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))


def _check_room(repositories: Sequence[_Repository]) -> None:
    """Raise DiskFullError if the missing files of all repositories do not fit into the cache."""
    missing = sum(repository.missing for repository in repositories)
    if not missing:
        return
    cache = repositories[0].folder.parent
    free, reserve = free_bytes(cache), reserve_bytes(cache)
    if missing + reserve > free:
        parts = ", ".join(f"{part.name} {human_bytes(part.missing)}" for part in repositories if part.missing)
        raise DiskFullError(
            f"the downloads need {human_bytes(missing)} ({parts}) and a reserve of {human_bytes(reserve)}, "
            f"but {cache} has {human_bytes(free)} free",
            hint="free some space, or choose another folder: --to DIR",
        )


def _download(repository: _Repository, progress: Progress) -> FetchedItem:
    from huggingface_hub import snapshot_download

    try:
        with _shown_growth(repository, progress):
            for commit, file in repository.large:
                download_blob(repository.name, repository.kind, commit, file, repository.folder / "blobs")
            path = snapshot_download(
                repository.name,
                repo_type=repository.kind,
                revision=repository.revision,
                allow_patterns=list(repository.patterns),
                token=key("HF_TOKEN") or None,
            )
    except BuckeyeError:
        raise
    except Exception as error:  # network, authentication, a full disk: the hub's errors vary
        raise _hub_error(repository.kind, repository.name, error) from None
    if repository.kind == "model":
        check_model_files(Path(path), "server")
    return FetchedItem(
        kind=repository.kind,
        name=repository.name,
        path=path,
        size=size_of(repository.folder / "blobs"),
        downloaded=repository.missing > 0,
    )


@contextmanager
def _shown_growth(repository: _Repository, progress: Progress) -> Iterator[None]:
    """Show the number of downloaded bytes during the block."""
    blobs, stopped = repository.folder / "blobs", threading.Event()
    before, total = size_of(blobs), human_bytes(repository.missing)

    def show() -> None:
        while True:
            done = human_bytes(min(repository.missing, size_of(blobs) - before))
            progress(f"downloading {repository.name}: {done} of {total}")
            if stopped.wait(_POLL_SECONDS):
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _environments(
    environments: Sequence[EnvConfig], sources: Sequence[str], index: str | None, progress: Progress
) -> Iterator[FetchedItem]:
    """Install the environments that this machine lacks; yield all that have a separate interpreter."""
    for source in sources:
        if find_installed(parse_source(source).name) is None:
            install_environment(InstallRequest(what=source, index=index), report=progress)
            yield _installed(parse_source(source).name, downloaded=True)
    for name in dict.fromkeys(package_name(env.id) for env in environments if env.python is None):
        try:
            find_interpreter(name, WorkerSettings())
        except EnvironmentNotFoundError:
            install_environment(InstallRequest(what=name, index=index), report=progress)
            yield _installed(name, downloaded=True)
        else:
            if find_installed(name) is not None:
                yield _installed(name, downloaded=False)


def _installed(name: str, *, downloaded: bool) -> FetchedItem:
    environment = find_installed(name)
    assert environment is not None
    return FetchedItem(
        kind="environment",
        name=f"{environment.id} {environment.version}",
        path=str(environment.folder),
        size=size_of(environment.folder),
        downloaded=downloaded,
    )


def _images(environments: Sequence[EnvConfig], progress: Progress) -> Iterator[FetchedItem]:
    """Prepare the images that gateways of this machine start."""
    images = gateway_images(environments)
    if not images:
        return
    with TemporaryDirectory() as folder:
        runtime = image_runtime("auto", SandboxLimits(), Path(folder))
        for image in images:
            progress(f"preparing the image {image}")
            asyncio.run(runtime.prepare(image))
            yield FetchedItem(
                kind="image", name=image, path=f"images of {runtime.name}", size=None, downloaded=True
            )
