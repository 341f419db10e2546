"""The HTTP side of server.Endpoints."""

# No "from __future__ import annotations": FastAPI looks at the types.
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ..._errors import InvalidArgumentError
from .._updates import fields_of
from ._requests import init_of, replicas_of, update_of

_MOST_BYTES = 1 << 20


def add_routes(app: FastAPI, server: Any) -> None:
    async def answer(work: Any) -> JSONResponse:
        try:
            return JSONResponse(fields_of(await work()))
        except InvalidArgumentError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 400)

    async def join(request: Request) -> JSONResponse:
        async def work() -> Any:
            body = await _body(request)
            return await server.join(init_of(body), replicas_of(body), request.is_disconnected)

        return await answer(work)

    async def update(request: Request) -> JSONResponse:
        async def work() -> Any:
            return await server.update(update_of(await _body(request)), request.is_disconnected)

        return await answer(work)

    async def status() -> JSONResponse:
        return await answer(server.status)

    app.add_api_route("/v1/tessera/join", join, methods=["POST"])
    app.add_api_route("/v1/tessera/update", update, methods=["POST"])
    app.add_api_route("/v1/tessera/status", status, methods=["GET"])


async def _body(request: Request) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BYTES:
            raise InvalidArgumentError(f"the body has more than {_MOST_BYTES} bytes")
    try:
        return json.loads(bytes(data) or b"{}")
    except ValueError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
