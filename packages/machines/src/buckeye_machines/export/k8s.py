"""Manifests for Kubernetes: the files, a volume for what the run writes, and the job."""

from __future__ import annotations

import json
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from buckeye.errors import UsageError
from buckeye_machines.export.job import Job, gib, install_script, start_script

_MOST_BYTES = 900_000  # a ConfigMap holds 1 MiB
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
    that names folders, or files too large or not in UTF-8, which a ConfigMap cannot carry."""
    files = _contents(job)
    script = install_script(job) + start_script(job, output_dir=f"{_OUTPUT}/{job.output_dir}")
    data = {"start.sh": script} | {f"file-{number}": text for number, text in enumerate(files.values())}
    items = "".join(
        f"              - {{key: file-{number}, path: {json.dumps(path.as_posix())}}}\n"
        for number, path in enumerate(files)
    )
    return f"""\
# Written by `buckeye rl export k8s`. Start it:  kubectl apply -f FILE
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
  accessModes: [ReadWriteOnce]
  resources:
    requests:
      storage: {gib(job.disk_gb)}Gi
---
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
{_limits(job)}          volumeMounts:
            - {{name: project, mountPath: {_PROJECT}}}
            - {{name: output, mountPath: {_OUTPUT}}}
            - {{name: memory, mountPath: /dev/shm}}
      volumes:
        - name: project
          configMap:
            name: {job.name}
            items:
              - {{key: start.sh, path: start.sh}}
{items}        - name: output
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
