"""Build the image of a folder with a Dockerfile, and push it.

docker, podman and buildah store and push their own images. An image of buildah is also copied to Buckeye's
store (`buckeye/mcp/images`), and runs from there without a daemon.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from buckeye.base.process import run_program
from buckeye.errors import UsageError
from buckeye.mcp.images.local_layouts import keep_layout
from buckeye.mcp.images.manifest import DOCKER_HUB, ImageReference, parse_reference
from buckeye.mcp.images.registry import is_local
from buckeye.mcp.sandbox.container_runtimes import find_program
from buckeye.mcp.sandbox.runtime import RuntimeUnavailableError, cache_folder, check_output

BUILDERS = ("docker", "podman", "buildah")
"""Programs that build images, in order of preference."""
_BUILD_SECONDS = 3600.0
_PUSH_SECONDS = 3600.0
_ANSWER_SECONDS = 30.0


def choose_builder(name: str = "auto") -> str:
    """Return the builder `name`, or for `auto` the first that works.

    Raises RuntimeUnavailableError, for `auto` with the reason of each builder.
    """
    if name != "auto":
        find_program(name)
        return name
    missing = []
    for one in BUILDERS:
        try:
            find_program(one)
            return one
        except RuntimeUnavailableError as error:
            missing.append(str(error))
    raise RuntimeUnavailableError(
        "Nothing that builds images works on this machine:\n  "
        + "\n  ".join(missing)
        + "\nbuildah needs no daemon: apt-get install buildah"
    )


def build_image(folder: Path, image: str, builder: str = "auto") -> str:
    """Build the image `name:tag`, and return its digest, or "" if the builder knows none before a push.

    Raises UsageError without a Dockerfile, RuntimeUnavailableError without a builder, and PrepareError with the
    last output of a failed build.
    """
    if not (folder / "Dockerfile").is_file():
        raise UsageError(f"{folder} has no Dockerfile; `buckeye env new` writes one for a new environment")
    reference = parse_reference(image)
    name = choose_builder(builder)
    isolation = ["--isolation", "chroot"] if name == "buildah" else []  # also works inside containers
    argv = [name, "build", *isolation, "--tag", image, str(folder)]
    check_output(argv, _BUILD_SECONDS, f"{folder} cannot be built into an image")
    if name == "podman":
        return check_output(
            [name, "image", "inspect", "--format", "{{.Digest}}", image], _ANSWER_SECONDS, image
        )
    return _kept_by_us(image, reference) if name == "buildah" else ""


def _kept_by_us(image: str, reference: ImageReference) -> str:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".built-", dir=folder) as temporary:
        layout = Path(temporary, "layout")
        check_output(["buildah", "push", "--quiet", image, f"oci:{layout}:built"], _BUILD_SECONDS, image)
        return keep_layout(layout, reference, folder).digest


def push_image(image: str, target: str, *, progress: Callable[[str], None]) -> str:
    """Push an image with the program that built it, under the name `target`.

    Returns the digest in the registry, or "" if unknown. Raises UsageError if no builder has the image, and
    PrepareError if the registry refuses it.
    """
    reference = parse_reference(target)
    if reference.registry == DOCKER_HUB and reference.repository.startswith("library/"):
        raise UsageError(
            f"{target} says neither registry nor owner. Name both, as "
            f"`buckeye env push --image ghcr.io/my-org/{target}`"
        )
    name = next((one for one in BUILDERS if _has(one, image)), None)
    if name is None:
        raise UsageError(f"{image} was not built here. Build it first: `buckeye env build`")
    progress(f"pushing {target} with {name}")
    if target != image:
        check_output([name, "tag", image, target], _ANSWER_SECONDS, target)
    failed = f"{target} cannot be pushed (`docker login {reference.registry}` stores a login)"
    if name == "docker":
        check_output([name, "push", "--quiet", target], _PUSH_SECONDS, failed)
        return _digest_in_docker(target, reference)
    plain = ["--tls-verify=false"] if is_local(reference.registry) else []
    with tempfile.NamedTemporaryFile("r", prefix="buckeye-digest-") as digest:
        words = [name, "push", "--quiet", *plain, "--digestfile", digest.name, target]
        check_output(words, _PUSH_SECONDS, failed)
        return digest.read().strip()


def _digest_in_docker(target: str, reference: ImageReference) -> str:
    inspect = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", target]
    digests = json.loads(check_output(inspect, _ANSWER_SECONDS, target)) or []
    named = [str(one).partition("@") for one in digests]
    found = [digest for of, _, digest in named if parse_reference(of).repository == reference.repository]
    return found[-1] if found else ""


def _has(name: str, image: str) -> bool:
    try:
        find_program(name)
    except RuntimeUnavailableError:
        return False
    words = ["inspect", "--type", "image"] if name == "buildah" else ["image", "inspect"]
    return run_program([name, *words, image], seconds=_ANSWER_SECONDS).returncode == 0
