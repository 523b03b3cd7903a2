"""Everything but inference: status, metadata, health, metrics, the description, and the page."""

from __future__ import annotations

from importlib import metadata, resources
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from paceline.serve.core import App, Core
from paceline.serve.manager import Entry, Model, NotServedError
from paceline.serve.messages import tensorflow_metadata, v2_metadata
from paceline.serve.openapi import description
from paceline.serve.statistics import prometheus

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
    " img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page is one file: whatever it would load from elsewhere is refused by the browser."""


class VersionNumber(Convertor[int]):
    """In a path: as many digits as a version can have. Thousands would be an error of ours."""

    regex = "[0-9]{1,16}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("version", VersionNumber())


def answer_json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


def routes(core: Core) -> App:
    """The router of a server."""
    manager = core.manager

    def model_of(request: Request) -> Model:
        name = request.path_params["name"]
        if name not in manager.models:
            raise HTTPException(404, f"there is no model {name[:100]!r}")
        return manager.models[name]

    def entry_of(request: Request) -> Entry:
        model = model_of(request)
        number, label = request.path_params.get("number"), request.path_params.get("label")
        try:
            return manager.find(model.name, number, label)
        except NotServedError as error:
            raise HTTPException(503 if error.known else 404, str(error)) from None

    async def status(request: Request) -> Response:
        model = model_of(request)
        number = request.path_params.get("number")
        if label := request.path_params.get("label"):
            number = model.serving.labels.get(label, -1)
        entries = [e for n, e in sorted(model.entries.items()) if number in (None, n)]
        if not entries:
            raise HTTPException(404, f"{model.name} has no such version")
        return answer_json({"model_version_status": [_status(entry) for entry in entries]})

    async def tensorflow_about(request: Request) -> Response:
        entry = entry_of(request)
        assert entry.about is not None
        return answer_json(tensorflow_metadata(entry.name, entry.number, entry.about))

    async def v2_about(request: Request) -> Response:
        entry = entry_of(request)
        assert entry.about is not None
        numbers = manager.models[entry.name].available()
        return answer_json(v2_metadata(entry.name, numbers, entry.about))

    async def v2_ready(request: Request) -> Response:
        entry_of(request)
        return Response(status_code=200)

    async def v2_server(request: Request) -> Response:
        version = metadata.version("paceline")
        extensions = ["binary_tensor_data"]
        return answer_json({"name": "paceline", "version": version, "extensions": extensions})

    async def live(request: Request) -> Response:
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if manager.is_ready and not core.draining else 503)

    async def metrics(request: Request) -> Response:
        text = prometheus(core.statistics, _versions(core))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def overview(request: Request) -> Response:
        return answer_json({"models": _overview(core), "draining": core.draining})

    async def openapi(request: Request) -> Response:
        return answer_json(description(sorted(manager.models)))

    async def page(request: Request) -> Response:
        folder = resources.files("paceline.serve").joinpath("assets")
        name = "docs.html" if request.url.path == "/docs" else "page.html"
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        return Response(folder.joinpath(name).read_bytes(), media_type="text/html", headers=headers)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        core.statistics.refuse(error.status_code)
        return Response(
            orjson.dumps({"error": error.detail}),
            error.status_code,
            dict(error.headers or {}),
            media_type="application/json",
        )

    v1, v2 = "/v1/models/{name}", "/v2/models/{name}"
    number, label = "/versions/{number:version}", "/labels/{label}"
    table: list[Any] = [
        *(Route(v1 + part, status) for part in ("", number, label)),
        *(Route(f"{v1}{part}/metadata", tensorflow_about) for part in ("", number, label)),
        Route("/v2", v2_server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        *(Route(f"{v2}{part}/ready", v2_ready) for part in ("", number)),
        *(Route(v2 + part, v2_about) for part in ("", number)),
        Route("/metrics", metrics),
        Route("/api/models", overview),
        Route("/openapi.json", openapi),
        Route("/docs", page),
        Route("/", page),
    ]
    return Starlette(routes=table, exception_handlers={HTTPException: refused})


def _status(entry: Entry) -> dict[str, Any]:
    code = "UNKNOWN" if entry.error else "OK"
    return {
        "version": str(entry.number),
        "state": entry.state,
        "status": {"error_code": code, "error_message": entry.error},
    }


def _versions(core: Core) -> list[dict[str, Any]]:
    return [
        {
            "model": model.name,
            "version": number,
            "state": entry.state,
            "queued": entry.batcher.queued if entry.batcher else 0,
            "batches": entry.batcher.batches if entry.batcher else {},
        }
        for model in core.manager.models.values()
        for number, entry in sorted(model.entries.items())
    ]


def _overview(core: Core) -> list[dict[str, Any]]:
    """What the page shows."""
    found = []
    for name, model in sorted(core.manager.models.items()):
        versions = []
        for number, entry in sorted(model.entries.items(), reverse=True):
            record = core.statistics.records.get((name, number))
            about = entry.about
            line: dict[str, Any] = {
                "version": str(number),
                "state": entry.state,
                "evicted": entry.evicted,
                "error": entry.error,
                "labels": sorted(k for k, v in model.serving.labels.items() if v == number),
                "requests": sum(record.codes.values()) if record else 0,
                **(record.lately() if record else {"rate": 0.0, "p50": 0.0, "p99": 0.0}),
            }
            if about is not None:
                line |= {
                    "kind": "run" if entry.place.is_run else about.kind,
                    "made": about.made,
                    "metrics": about.origin.metrics,
                    "update": about.origin.update,
                    "run": about.origin.run,
                    "shape": list(about.signature.shape),
                    "pictures": about.signature.pictures is not None,
                    "channels": about.signature.pictures.channels
                    if about.signature.pictures
                    else 0,
                    "classes": len(about.signature.classes),
                }
            versions.append(line)
        serving = model.serving
        found.append(
            {
                "name": name,
                "policy": serving.policy,
                "canary_percent": serving.canary_percent if "canary" in serving.labels else 0,
                "problem": model.problem,
                "versions": versions,
            }
        )
    return found
