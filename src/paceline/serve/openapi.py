"""What the server can be asked, as OpenAPI says it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from paceline.schema.version import DATATYPES, INPUT

_ERROR = {"$ref": "#/components/schemas/Error"}
_NUMBERS: dict[str, Any] = {"type": "array", "items": {}}
_SIZES = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


def description(names: list[str]) -> dict[str, Any]:
    """The document behind /openapi.json; `names` are the models that are served now."""
    name = _parameter("name", {"type": "string", **({"enum": names} if names else {})})
    number = _parameter("number", {"type": "integer", "minimum": 0, "maximum": 2**53})
    label = _parameter("label", {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"})
    paths: dict[str, Any] = {
        "/v2": {"get": _get("The server and its extensions.")},
        "/v2/health/live": {"get": _get("Whether the server is there.", plain=True)},
        "/v2/health/ready": {"get": _get("Whether all models answer.", plain=True)},
        "/api/models": {"get": _get("Models, versions, accuracies, rates and latencies.")},
        "/metrics": {"get": _get("Counts and latencies for Prometheus.", plain=True)},
    }
    for part, more in (("", []), ("/versions/{number}", [number]), ("/labels/{label}", [label])):
        where = f"/v1/models/{{name}}{part}"
        parameters = [name, *more]
        paths[where] = {"get": _get("The state of the versions.", parameters)}
        paths[f"{where}/metadata"] = {"get": _get("Inputs and outputs.", parameters)}
        paths[f"{where}:predict"] = {
            "post": _post("The outputs of samples (TensorFlow Serving).", parameters, _PREDICT)
        }
        paths[f"{where}:classify"] = {
            "post": _post("The likeliest classes of samples.", parameters, _CLASSIFY)
        }
        if "label" not in part:
            where = f"/v2/models/{{name}}{part}"
            paths[where] = {"get": _get("Inputs and outputs.", parameters)}
            paths[f"{where}/ready"] = {"get": _get("Whether it answers.", parameters, plain=True)}
            paths[f"{where}/infer"] = {
                "post": _post("The outputs of a tensor (Open Inference).", parameters, _INFER)
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "paceline serve", "version": metadata.version("paceline")},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}},
                    "required": ["error"],
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


_ROWS = {"type": "array", "minItems": 1, "items": {}}
_PREDICT = {
    "application/json": {
        "schema": {
            "type": "object",
            "oneOf": [
                {"properties": {"instances": _ROWS}, "required": ["instances"]},
                {"properties": {"inputs": {}}, "required": ["inputs"]},
            ],
        }
    },
    "image/*": {"schema": {"type": "string", "format": "binary"}},
}
_EXAMPLE = {"type": "object", "properties": {INPUT: {}}, "required": [INPUT]}
_CLASSIFY = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {"examples": {"type": "array", "minItems": 1, "items": _EXAMPLE}},
            "required": ["examples"],
        }
    },
    "image/*": {"schema": {"type": "string", "format": "binary"}},
}
_INFER = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "inputs": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"const": INPUT},
                            "shape": _SIZES,
                            "datatype": {"enum": [*DATATYPES.values(), "BYTES"]},
                            "data": _NUMBERS,
                        },
                        "required": ["name", "shape", "datatype"],
                    },
                },
            },
            "required": ["inputs"],
        }
    }
}


def _get(
    summary: str, parameters: list[dict[str, Any]] | None = None, *, plain: bool = False
) -> dict[str, Any]:
    content = {} if plain else {"content": {"application/json": {"schema": {"type": "object"}}}}
    return {
        "summary": summary,
        "parameters": parameters or [],
        "responses": {"200": {"description": "Done.", **content}, "default": _refused()},
    }


def _post(summary: str, parameters: list[dict[str, Any]], content: Any) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "default": _refused(),
        },
    }


def _refused() -> dict[str, Any]:
    return {
        "description": "Refused, with the reason.",
        "content": {"application/json": {"schema": _ERROR}},
    }
