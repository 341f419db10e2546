"""Calls of an engine's HTTP interface.

Whatever answers at a server's address is not trusted: a call has one deadline for all of it, an answer's size is
bounded, and a redirect, which would take the key to somebody else, is not followed.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

from .._errors import UnavailableError

_MOST_SHOWN = 500
_MOST_BYTES = 16 << 20


class NotUp(UnavailableError):
    """Nothing answers at a server's address, or it says that it is not ready."""


class RefusedError(UnavailableError):
    """A server answers that it does not do what was asked (3xx, 4xx)."""


class NotFound(RefusedError):
    """A server lacks a route."""


class Late(UnavailableError):
    """A server has not answered in time. It may do all the same what was asked."""


class NoEngine(UnavailableError):
    """A page of HTML is answered, as by something else than an engine."""


_KINDS = {http.client.NOT_FOUND: NotFound, http.client.SERVICE_UNAVAILABLE: NotUp}


def call(
    url: str, path: str, body: Any = None, *, timeout: float, method: str = "POST", key: str | None = None
) -> dict[str, Any]:
    """Ask a server, and return the JSON object that it answers; {} for an empty answer.

    Args:
        timeout: Seconds for the whole call, besides the look-up of the host's name.
        key: Sent as a bearer's token.

    Raises:
        UnavailableError: For everything else.
    """
    where = f"{url.rstrip('/')}/{path}"
    data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(where, data, headers, method=method)
    with _Deadline(timeout) as deadline:
        try:
            text = _answer(request, where, deadline)
        except (OSError, ValueError, http.client.HTTPException, UnavailableError) as error:
            if deadline.passed:
                raise Late(f"{where} has not answered in {timeout:.3g} s") from None
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(f"{where}: {error}") from None
    if deadline.passed:  # what was cut off may look like an end
        raise Late(f"{where} has not answered in {timeout:.3g} s")
    try:
        answer = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        if text.lstrip().startswith(b"<"):
            raise NoEngine(f"{where} answered with a page of HTML: no engine does") from None
        answer = text.decode(errors="replace")
    if not isinstance(answer, dict):
        raise UnavailableError(f"{where} answered {str(answer)[:_MOST_SHOWN]}")
    return answer


def _answer(request: urllib.request.Request, where: str, deadline: _Deadline) -> bytes:
    opener = urllib.request.build_opener(_NoRedirects, _Plain(deadline), _Encrypted(deadline))
    try:
        with opener.open(request, timeout=deadline.timeout) as answer:
            text: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise _error_of(error, where) from None
    except urllib.error.URLError as error:
        missing = isinstance(error.reason, ConnectionError)
        raise (NotUp if missing else UnavailableError)(f"{where}: {error.reason}") from None
    if len(text) > _MOST_BYTES:
        raise UnavailableError(f"{where} answered more than {_MOST_BYTES >> 20} MiB")
    return text


def _error_of(error: urllib.error.HTTPError, where: str) -> UnavailableError:
    detail = error.read(4 * _MOST_SHOWN).decode(errors="replace").strip()[:_MOST_SHOWN]
    if error.code in _NoRedirects.CODES:
        detail = f"it sends callers to {error.headers.get('Location')!r}, which are not followed: give that URL"
    elif detail.startswith("<"):
        return NoEngine(f"{where} answered {error.code} with a page of HTML: no engine does")
    refused = error.code < http.client.INTERNAL_SERVER_ERROR
    kind = _KINDS.get(error.code, RefusedError if refused else UnavailableError)
    return kind(f"{where} answered {error.code}: {detail}")


class _Deadline:
    """Cuts connections off once the time is over: timeouts of sockets are those of each read."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.passed = False
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(timeout, self._pass)
        self._timer.name, self._timer.daemon = "tessera-http", True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for connection in self._connections:
            connection.close()

    def connect(self, *args: Any, **kwargs: Any) -> socket.socket:
        """Return what socket.create_connection() does, and cut it off in time."""
        made = socket.create_connection(*args, **kwargs)
        with self._lock:
            # TLS takes the socket's descriptor over.
            self._connections.append(socket.socket(fileno=os.dup(made.fileno())))
            if self.passed:
                self._cut()
        return made

    def _pass(self) -> None:
        with self._lock:
            self.passed = True
            self._cut()

    def _cut(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    CODES = (301, 302, 303, 307, 308)

    def redirect_request(self, *_: Any) -> None:
        return None


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, http.client.HTTPConnection, self._deadline), req)


class _Encrypted(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, http.client.HTTPSConnection, self._deadline), req)


def _connection(
    kind: type[http.client.HTTPConnection], deadline: _Deadline, host: str, **options: Any
) -> http.client.HTTPConnection:
    made = kind(host, **options)
    made._create_connection = deadline.connect  # type: ignore[attr-defined]
    return made
