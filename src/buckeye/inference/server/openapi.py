"""OpenAPI document of the server (/openapi.json), built from the types of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import buckeye
from buckeye.chat.messages import Tool


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """HTTP method and path, with handler, type of the body, and a JSON Schema per query parameter."""

    method: str
    path: str
    handler: Any
    body: type[msgspec.Struct] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)


def openapi_document(endpoints: Sequence[ApiRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document that describes the routes."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    refs, components = msgspec.json.schema_components(
        [*bodies, Tool], ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(bodies, refs, strict=False))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        schema = schemas.get(endpoint.body) if endpoint.body else None
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Buckeye inference", "version": buckeye.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: ApiRoute, schema: Any) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "schema": described} for name, described in endpoint.query.items()
    ]
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition("}")[0]
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "summary": " ".join((endpoint.handler.__doc__ or "").split()),
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}, "4XX": {"description": "Refused, with the reason"}},
    }
    if schema is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation
