"""Manifests for Kubernetes: the files, a volume for what the run writes, and the job: one pod, or KubeRay's
RayJob, whose pods are the nodes of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from buckeye.errors import UsageError
from buckeye_machines.export.job import (
    Job,
    gib,
    indented,
    install_here,
    install_script,
    start_here,
    start_script,
)

_MOST_BYTES = 900_000  # a ConfigMap holds 1 MiB
_RAY_VERSION = "2.52.0"  # the first that asks for a token
RAY_IMAGE = f"rayproject/ray:{_RAY_VERSION}-py312-gpu"
_PROJECT, _OUTPUT = "/project", "/output"
_PRODUCT = "nvidia.com/gpu.product"
_PRODUCTS = {
    "H100_80GB": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"),
    "H200_141GB": ("NVIDIA-H200",),
    "B200_180GB": ("NVIDIA-B200",),
    "A100_80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "A100_40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "L40S_48GB": ("NVIDIA-L40S",),
    "L40_48GB": ("NVIDIA-L40",),
    "L4_24GB": ("NVIDIA-L4",),
    "A40_48GB": ("NVIDIA-A40",),
    "A30_24GB": ("NVIDIA-A30",),
    "A10_24GB": ("NVIDIA-A10",),
    "A6000_48GB": ("NVIDIA-RTX-A6000",),
    "T4_16GB": ("Tesla-T4",),
    "V100_32GB": ("Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-32GB"),
    "V100_16GB": ("Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"),
    "RTX6000Ada_48GB": ("NVIDIA-RTX-6000-Ada-Generation",),
    "RTX5090_32GB": ("NVIDIA-GeForce-RTX-5090",),
    "RTX4090_24GB": ("NVIDIA-GeForce-RTX-4090",),
    "RTX3090_24GB": ("NVIDIA-GeForce-RTX-3090",),
}
"""What NVIDIA's GPU feature discovery calls nodes that have a type."""


def k8s_manifests(job: Job, image: str) -> str:
    """Text for `kubectl apply -f`. `image` has Python, a compiler, and no more. Raises UsageError for a run
    on several nodes, and for one that names folders, or files too large or not in UTF-8, which a ConfigMap
    cannot carry."""
    if job.nodes > 1:
        raise UsageError(
            f"{job.config} has cluster.nodes = {job.nodes}, and a Job is for one machine. On several: "
            f"buckeye rl export rayjob {job.config}"
        )
    script = install_script(job) + start_script(job, output_dir=f"{_OUTPUT}/{job.output_dir}")
    return f"""\
{_files(job, "k8s", {"start.sh": script}, "ReadWriteOnce")}---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  backoffLimit: 5
  template:
    spec:
      restartPolicy: OnFailure
      automountServiceAccountToken: false
{_affinity(job)}      containers:
        - name: rl
          image: {json.dumps(image)}
          command: [bash, {_PROJECT}/start.sh]
          workingDir: {_PROJECT}
          env:
            - {{name: HOME, value: {_OUTPUT}}}
          envFrom:
            - secretRef: {{name: {job.name}-keys, optional: true}}
{_limits(job)}{_volumes(job, "start.sh")}"""


def rayjob_manifests(job: Job, image: str) -> str:
    """Text for `kubectl apply -f` where KubeRay 1.6 is. `image` has Python and Ray. The run is started on one
    of the pods by a job of Ray, and takes the others. Raises UsageError as `k8s_manifests` does."""
    output = f"{_OUTPUT}/{job.output_dir}"
    start = f"cd {_PROJECT}\n{start_here(job, output_dir=output, more='--cluster.engine ray ')}"
    scripts = {"install.sh": f"set -eu\n{install_here(job)}", "start.sh": start}
    others = f"""\
    workerGroupSpecs:
      - groupName: nodes
        replicas: {job.nodes - 1}
        minReplicas: {job.nodes - 1}
        maxReplicas: {job.nodes - 1}
        rayStartParams: {{}}
        template:
{indented(_pod(job, image, scripts), 10)}"""
    return f"""\
{_files(job, "rayjob", scripts, "ReadWriteMany")}---
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {job.name}
spec:
  entrypoint: bash {_PROJECT}/start.sh
{f"  entrypointNumGpus: {job.gpus.count}{chr(10)}" if job.gpus is not None else ""}\
  submissionMode: HTTPMode
  backoffLimit: 5
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    rayVersion: "{_RAY_VERSION}"
    authOptions: {{mode: token}}
    headGroupSpec:
      rayStartParams: {{}}
      template:
{indented(_pod(job, image, scripts), 8)}{others if job.nodes > 1 else ""}"""


def unsaid_by_rayjob(job: Job) -> list[str]:
    """What they cannot say, a line each."""
    shared = [f"the volume {job.name} must be of a storage class that many pods may mount (ReadWriteMany)"]
    return [*unsaid_by_k8s(job), *(shared if job.nodes > 1 else [])]


def _pod(job: Job, image: str, scripts: Mapping[str, str]) -> str:
    """A node of the Ray cluster. KubeRay has `command` carried out before what starts Ray; until that is done
    no probe counts."""
    return f"""\
spec:
      automountServiceAccountToken: false
      securityContext: {{fsGroup: 1000}}
{_affinity(job)}      containers:
        - name: ray
          image: {json.dumps(image)}
          command: [bash {_PROJECT}/install.sh]
          envFrom:
            - secretRef: {{name: {job.name}-keys, optional: true}}
          startupProbe:
            exec: {{command: [test, -e, /tmp/ray/session_latest]}}
            periodSeconds: 10
            failureThreshold: 360
{_limits(job)}{_volumes(job, *scripts)}""".replace("\n    ", "\n")


def _files(job: Job, system: str, scripts: Mapping[str, str], access: str) -> str:
    """The manifests of the run's files and of its volume."""
    data = {**scripts, **{f"file-{number}": text for number, text in enumerate(_contents(job).values())}}
    return f"""\
# Written by `buckeye rl export`, {system}. Start it:  kubectl apply -f FILE
# What it writes stays on the volume {job.name}, and a pod that is lost goes on there.
# Keys that the run needs, from a file with lines NAME=value; of these, for example:
#   {", ".join(job.keys)}
#   kubectl create secret generic {job.name}-keys --from-env-file=FILE
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}
{_block({"data": data})}---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {job.name}
spec:
  accessModes: [{access}]
  resources:
    requests:
      storage: {gib(job.disk_gb)}Gi
"""


def _volumes(job: Job, *scripts: str) -> str:
    """The end of a pod: what it mounts."""
    items = [f"{{key: {name}, path: {name}}}" for name in scripts]
    items += [
        f"{{key: file-{number}, path: {json.dumps(path.as_posix())}}}"
        for number, path in enumerate(_contents(job))
    ]
    return f"""\
          volumeMounts:
            - {{name: project, mountPath: {_PROJECT}}}
            - {{name: output, mountPath: {_OUTPUT}}}
            - {{name: memory, mountPath: /dev/shm}}
      volumes:
        - name: project
          configMap:
            name: {job.name}
            items:
{"".join(f"              - {item}{chr(10)}" for item in items)}\
        - name: output
          persistentVolumeClaim: {{claimName: {job.name}}}
        - name: memory
          emptyDir: {{medium: Memory}}
"""


def unsaid_by_k8s(job: Job) -> list[str]:
    """What the manifests cannot say of the job, a line each."""
    gpus = job.gpus
    if gpus is None or not gpus.type:
        return []
    if gpus.type in _PRODUCTS:
        return [f"the pod waits for a node with the label {_PRODUCT}, which NVIDIA's GPU operator sets"]
    return [
        f"the manifests ask for {gpus.count} GPUs and not for {gpus.type}, whose label is not known "
        f"here: add a nodeSelector to the job's pod, as `{_PRODUCT}: ...` (kubectl get nodes -L {_PRODUCT})"
    ]


def _limits(job: Job) -> str:
    if job.gpus is None:
        return ""
    return f"""\
          resources:
            limits:
              nvidia.com/gpu: {job.gpus.count}
"""


def _affinity(job: Job) -> str:
    products = _PRODUCTS.get(job.gpus.type) if job.gpus is not None else None
    if products is None:
        return ""
    return f"""\
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {{key: {_PRODUCT}, operator: In, values: [{", ".join(products)}]}}
"""


class _Dumper(yaml.SafeDumper):
    """Writes texts as blocks, where their characters allow it."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _block(value: dict[str, dict[str, str]]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _contents(job: Job) -> dict[Path, str]:
    """The text of every file that the run needs."""
    contents: dict[Path, str] = {}
    for path in dict.fromkeys((job.config, *job.files)):
        if path.is_dir():
            raise UsageError(f"{path} is a folder, which an export for Kubernetes cannot carry. {_INSTEAD}")
        try:
            contents[path] = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read as text ({error}). {_INSTEAD}") from None
        if sum(map(len, map(str.encode, contents.values()))) > _MOST_BYTES:
            raise UsageError(f"{path} and the files before it are more than a ConfigMap can hold. {_INSTEAD}")
    return contents


_INSTEAD = (
    "Put it into an image (--image) and name it by its absolute path there, or on the Hugging Face hub."
)
