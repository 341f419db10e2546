"""Calls of servers that answer in no good way; no engine is needed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tessera import UnavailableError
from tessera.engines._http import NotFound, NotUp, RefusedError, call

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LONG = 60  # seconds, in which a server answers a byte at a time
Handler = Callable[[socket.socket, bytes], None]


class Servers:
    """Servers of one call each, which end with the test."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, handler: Handler) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=self._serve, args=(listener, handler))
        thread.start()
        self._threads.append(thread)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _serve(self, listener: socket.socket, handler: Handler) -> None:
        listener.settimeout(0.05)
        with listener:
            while not self.over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    asked = b""
                    while not asked.endswith(b"}"):  # of the body: what is left unread would reset the connection
                        asked += connection.recv(65536)
                    with contextlib.suppress(OSError):  # the caller has gone
                        handler(connection, asked)
                return

    def drip(self, connection: socket.socket) -> None:
        end = time.monotonic() + LONG
        while not self.over.is_set() and time.monotonic() < end:
            connection.sendall(b" ")
            self.over.wait(0.05)

    def close(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def ask(url: str, timeout: float = 1.0, **options: Any) -> Any:
    return call(url, "status", {"a": 1}, timeout=timeout, **options)


@pytest.mark.parametrize(
    "before", [OK + b"Content-Length: 100000\r\n\r\n", OK + b"\r\n", OK + b"X-Long:", b"", b"HTTP/1.1 500 "]
)
def test_the_deadline_is_that_of_the_whole_call(servers: Servers, before: bytes) -> None:
    def handler(connection: socket.socket, _: bytes) -> None:
        connection.sendall(before)
        servers.drip(connection)

    with pytest.raises(UnavailableError, match="/status has not answered in 1 s"):
        ask(servers.start(handler))
    assert not any(thread.name == "tessera-http" for thread in threading.enumerate())


def test_an_answer_without_end_is_given_up(servers: Servers) -> None:
    def handler(connection: socket.socket, _: bytes) -> None:
        connection.sendall(OK + b"\r\n")
        while not servers.over.is_set():
            connection.sendall(b" " * (1 << 20))

    with pytest.raises(UnavailableError, match="answered more than 16 MiB"):
        ask(servers.start(handler), timeout=60)


@pytest.mark.parametrize("text", [b"[" * 200_000, b"[1]", b"3", b"no JSON", b"\xff\xfe"])
def test_what_is_no_object_is_told(servers: Servers, text: bytes) -> None:
    def handler(connection: socket.socket, _: bytes) -> None:
        connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(text) + text)

    with pytest.raises(UnavailableError, match="/status answered "):
        ask(servers.start(handler), timeout=60)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_the_key_stays_here(servers: Servers, code: int) -> None:
    seen: list[bytes] = []
    other = servers.start(lambda connection, asked: seen.append(asked))

    def handler(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 %d Moved\r\nLocation: %s/\r\nContent-Length: 0\r\n\r\n" % (code, other.encode()))

    with pytest.raises(RefusedError, match=f"answered {code}: it sends callers to '{other}/'"):
        ask(servers.start(handler), timeout=60, key="secret")
    assert seen == []


@pytest.mark.parametrize(
    ("code", "kind"), [(404, NotFound), (503, NotUp), (400, RefusedError), (500, UnavailableError)]
)
def test_errors_have_their_kinds(servers: Servers, code: int, kind: type[UnavailableError]) -> None:
    def handler(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 %d No\r\nContent-Length: 5\r\n\r\nwords" % code)

    with pytest.raises(kind, match=f"answered {code}: words") as caught:
        ask(servers.start(handler), timeout=60)
    assert type(caught.value) is kind


def test_an_object_is_returned_and_nothing_is_an_empty_one(servers: Servers) -> None:
    asked: list[bytes] = []

    def handler(connection: socket.socket, request: bytes) -> None:
        asked.append(request)
        connection.sendall(OK + b'Content-Length: 8\r\n\r\n{"b": 2}')

    assert ask(servers.start(handler), timeout=60, key="secret") == {"b": 2}
    assert b"Authorization: Bearer secret" in asked[0] and b"POST /status" in asked[0]
    assert ask(servers.start(lambda connection, _: connection.sendall(OK + b"Content-Length: 0\r\n\r\n"))) == {}


def test_a_server_that_is_not_there_is_not_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NotUp, match="Connection refused"):
        ask(f"http://127.0.0.1:{port}", timeout=60)
