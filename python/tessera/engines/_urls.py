"""URLs of engines, as users write them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from .._errors import InvalidArgumentError

_PORTS = {"http": 80, "https": 443}


def named_urls(engines: Any, kind: str) -> dict[str, str]:
    """Return the URLs of engines by name: of one URL, of several, which are named engine0, engine1 and so on, or of
    URLs by name. An address without a scheme is one of HTTP, and OpenAI's /v1 behind it, which clients want, goes.

    Args:
        kind: Whose engines they are, for messages: "vLLM".

    Raises:
        InvalidArgumentError: For what is no URL, and for one server under two names.
    """
    if isinstance(engines, Mapping):
        given = dict(engines)
    elif isinstance(engines, str):
        given = {"engine0": engines}
    elif isinstance(engines, Iterable) and not isinstance(engines, bytes):
        given = {f"engine{number}": url for number, url in enumerate(engines)}
    else:
        given = {}
    if not given:
        raise InvalidArgumentError(
            f"engines={engines!r}: give {{name: URL of {_a(kind)} server}}, a URL, or a list of URLs"
        )
    named: dict[str, str] = {}
    names: dict[tuple[str, int, str], str] = {}
    for name, url in given.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"engines: the name {name!r} of {url!r} is no text")
        named[name], place = _normal(name, url)
        if place in names:
            raise InvalidArgumentError(
                f"engines: {names[place]!r} and {name!r} are one server, {named[name]}: name each server once"
            )
        names[place] = name
    return named


def _normal(name: str, url: Any) -> tuple[str, tuple[str, int, str]]:
    """Return a URL, and what two URLs of one server have alike."""
    if not isinstance(url, str):
        raise InvalidArgumentError(f"engines: the URL of {name!r} is {url!r}: give http://HOST:PORT")
    text = url.strip()
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise InvalidArgumentError(f"engines: {url!r} of {name!r}: {error}") from None
    why = ""
    if parts.scheme not in _PORTS:
        why = f"it has the scheme {parts.scheme!r}"
    elif not host or any(each.isspace() for each in text):
        why = "it names no host"
    elif parts.username is not None:
        why = "a name or password in it goes nowhere"
    elif parts.query or parts.fragment:
        why = "it has more than a path behind the host"
    if why:
        raise InvalidArgumentError(f"engines: {url!r} of {name!r}: {why}: give http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    assert host is not None
    return f"{parts.scheme}://{parts.netloc}{path}", (host, port or _PORTS[parts.scheme], path)


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("S") else f"a {kind}"
