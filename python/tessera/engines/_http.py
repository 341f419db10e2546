"""Calls of an engine's HTTP interface."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from .._errors import UnavailableError

_MOST_SHOWN = 500


class NotUp(UnavailableError):
    """Nothing answers at a server's address, or it says that it is not ready."""


class RefusedError(UnavailableError):
    """A server answers that it does not do what was asked (4xx)."""


class NotFound(RefusedError):
    """A server lacks a route."""


_KINDS = {http.client.NOT_FOUND: NotFound, http.client.SERVICE_UNAVAILABLE: NotUp}


def call(
    url: str, path: str, body: Any = None, *, timeout: float, method: str = "POST", key: str | None = None
) -> dict[str, Any]:
    """The JSON object that it answers; {} for an empty answer. Raises UnavailableError for everything else."""
    where = f"{url.rstrip('/')}/{path}"
    data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(where, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found = json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:_MOST_SHOWN]
        refused = error.code < http.client.INTERNAL_SERVER_ERROR
        kind = _KINDS.get(error.code, RefusedError if refused else UnavailableError)
        raise kind(f"{where} answered {error.code}: {detail}") from None
    except urllib.error.URLError as error:
        missing = isinstance(error.reason, ConnectionError)
        raise (NotUp if missing else UnavailableError)(f"{where}: {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(f"{where}: {error}") from None
    if not isinstance(found, dict):
        raise UnavailableError(f"{where} answered {str(found)[:_MOST_SHOWN]}")
    return found
