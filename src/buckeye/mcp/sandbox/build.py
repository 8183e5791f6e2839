"""Build the image of a folder with a Dockerfile, and push it.

docker, podman and buildah store and push their own images. An image that buildah builds is also copied to
Buckeye's store (`buckeye/mcp/images`), so that it runs without a daemon.
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
_INSPECT_SECONDS = 30.0


def choose_builder(name: str = "auto") -> str:
    """Return the builder `name`, or for `auto` the first builder that works.

    Raises RuntimeUnavailableError if no builder works, with the reason for each builder.
    """
    if name != "auto":
        find_program(name)
        return name
    reasons = []
    for builder in BUILDERS:
        try:
            find_program(builder)
            return builder
        except RuntimeUnavailableError as error:
            reasons.append(error.message)
    raise RuntimeUnavailableError(
        "no image builder works on this machine:\n  " + "\n  ".join(reasons),
        hint="install a builder; buildah needs no daemon: `apt-get install buildah`",
    )


def build_image(folder: Path, image: str, builder: str = "auto") -> str:
    """Build the image `name:tag`, and return its digest. Return "" for docker, which assigns it at a push.

    Raises UsageError if the folder has no Dockerfile, RuntimeUnavailableError if no builder works, and
    PrepareError, with the builder's last output, if the build fails.
    """
    if not (folder / "Dockerfile").is_file():
        raise UsageError(
            f"{folder} has no Dockerfile",
            code="BK-FILE-NOT-FOUND",
            hint="write a Dockerfile; `buckeye env new` creates an environment with a Dockerfile",
        )
    reference = parse_reference(image)
    name = choose_builder(builder)
    isolation = ["--isolation", "chroot"] if name == "buildah" else []  # works inside containers too
    argv = [name, "build", *isolation, "--tag", image, str(folder)]
    check_output(argv, _BUILD_SECONDS, f"cannot build an image from {folder}")
    if name == "podman":
        argv = [name, "image", "inspect", "--format", "{{.Digest}}", image]
        return check_output(argv, _INSPECT_SECONDS, f"cannot inspect image {image}")
    return _copy_to_store(image, reference) if name == "buildah" else ""


def _copy_to_store(image: str, reference: ImageReference) -> str:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".built-", dir=folder) as temporary:
        layout = Path(temporary, "layout")
        argv = ["buildah", "push", "--quiet", image, f"oci:{layout}:built"]
        check_output(argv, _BUILD_SECONDS, f"cannot copy image {image}")
        return keep_layout(layout, reference, folder).digest


def push_image(image: str, target: str, *, progress: Callable[[str], None]) -> str:
    """Push an image under the name `target`, with the program that built it.

    Return the digest in the registry, or "" if unknown. Raises UsageError if no builder has the image, and
    PrepareError if the push fails.
    """
    reference = parse_reference(target)
    if reference.registry == DOCKER_HUB and reference.repository.startswith("library/"):
        raise UsageError(
            f"cannot push {target}: the name has no registry and no owner",
            code="BK-IMAGE",
            hint=f"add a registry and an owner: `buckeye env push --image ghcr.io/my-org/{target}`",
        )
    name = next((builder for builder in BUILDERS if _has_image(builder, image)), None)
    if name is None:
        raise UsageError(
            f"no builder on this machine has the image {image}",
            code="BK-IMAGE",
            hint="build it first: `buckeye env build`",
        )
    progress(f"pushing {target} with {name}")
    if target != image:
        check_output([name, "tag", image, target], _INSPECT_SECONDS, f"cannot tag image {image}")
    failed = f"cannot push image {target}"
    hint = f"if a login is missing: `docker login {reference.registry}`"
    if name == "docker":
        check_output([name, "push", "--quiet", target], _PUSH_SECONDS, failed, hint=hint)
        return _read_docker_digest(target, reference)
    plain_http = ["--tls-verify=false"] if is_local(reference.registry) else []
    with tempfile.NamedTemporaryFile("r", prefix="buckeye-digest-") as digest:
        argv = [name, "push", "--quiet", *plain_http, "--digestfile", digest.name, target]
        check_output(argv, _PUSH_SECONDS, failed, hint=hint)
        return digest.read().strip()


def _read_docker_digest(target: str, reference: ImageReference) -> str:
    argv = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", target]
    entries = json.loads(check_output(argv, _INSPECT_SECONDS, f"cannot inspect image {target}")) or []
    digests = [
        digest
        for name, _, digest in (str(entry).partition("@") for entry in entries)
        if parse_reference(name).repository == reference.repository
    ]
    return digests[-1] if digests else ""


def _has_image(name: str, image: str) -> bool:
    try:
        find_program(name)
    except RuntimeUnavailableError:
        return False
    subcommand = ["inspect", "--type", "image"] if name == "buildah" else ["image", "inspect"]
    return run_program([name, *subcommand, image], seconds=_INSPECT_SECONDS).returncode == 0
