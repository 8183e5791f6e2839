"""What KubeRay says a RayJob is: the fields of `ray.io/v1` and their types, after the reference of KubeRay
1.6. Pods are what Kubernetes defines, and are looked at by its own schema."""

from __future__ import annotations

from typing import Any

_TEXT, _BOOLEAN, _POD = {"type": "string"}, {"type": "boolean"}, {"type": "object", "required": ["spec"]}
_COUNT, _NUMBER = {"type": "integer", "minimum": 0}, {"type": "number"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}


def _object(*required: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


_GROUP = {"rayStartParams": _TEXTS, "template": _POD, "resources": _TEXTS, "labels": _TEXTS}
_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_TEXT,
    suspend=_BOOLEAN,
    managedBy=_TEXT,
    enableInTreeAutoscaling=_BOOLEAN,
    autoscalerOptions={"type": "object"},
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=_TEXT, enableK8sTokenAuth=_BOOLEAN),
    gcsFaultToleranceOptions={"type": "object"},
    headServiceAnnotations=_TEXTS,
    headGroupSpec=_object(
        "template", **_GROUP, serviceType=_TEXT, headService={"type": "object"}, enableIngress=_BOOLEAN
    ),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            *("groupName", "maxReplicas", "minReplicas", "template"),
            **_GROUP,
            groupName=_TEXT,
            replicas=_COUNT,
            minReplicas=_COUNT,
            maxReplicas=_COUNT,
            numOfHosts=_COUNT,
            suspend=_BOOLEAN,
            idleTimeoutSeconds=_COUNT,
            scaleStrategy={"type": "object"},
        ),
    },
)
RAYJOB = _object(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS),
    spec=_object(
        entrypoint=_TEXT,
        runtimeEnvYAML=_TEXT,
        jobId=_TEXT,
        metadata=_TEXTS,
        entrypointNumCpus=_NUMBER,
        entrypointNumGpus=_NUMBER,
        entrypointResources=_TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        submitterPodTemplate=_POD,
        submitterConfig=_object(backoffLimit=_COUNT),
        rayClusterSpec=_CLUSTER,
        clusterSelector=_TEXTS,
        shutdownAfterJobFinishes=_BOOLEAN,
        ttlSecondsAfterFinished=_COUNT,
        activeDeadlineSeconds=_COUNT,
        preRunningDeadlineSeconds=_COUNT,
        backoffLimit=_COUNT,
        suspend=_BOOLEAN,
        managedBy=_TEXT,
        deletionStrategy={"type": "object"},
    ),
)
