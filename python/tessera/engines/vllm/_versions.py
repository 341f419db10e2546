"""Marks answers of a vLLM server with the versions of the weights that sampled their tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

HEADER = b"x-weight-version"
FIELD = "weight_versions"
_EVENT = b"\n\n"
_DATA = b"data: "


class Spans:
    """Of one HTTP request: by the index of its choices, which tokens which version has sampled."""

    def __init__(self) -> None:
        self._prompts = 0
        self.of_choice: dict[int, list[dict[str, Any]]] = {}

    def next_prompt(self) -> int:
        self._prompts += 1
        return self._prompts - 1

    def note(self, prompt: int, samples: int, output: Any) -> None:
        """`output`: vLLM's RequestOutput. Its finished choices have spans, where this vLLM counts them."""
        for each in getattr(output, "outputs", ()):
            spans = getattr(each, FIELD, None)
            if spans:
                index = prompt * samples + each.index
                self.of_choice[index] = [{"version": s.version, "start": s.start, "end": s.end} for s in spans]

    def put_into(self, answer: Any) -> bool:
        """Adds the field to those choices of an answer that have ended. Returns whether there was one."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        found = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason") is not None:
                spans = self.of_choice.get(choice.get("index", 0))
                if spans is not None:
                    choice[FIELD] = spans
                    found = True
        return found


_SPANS: ContextVar[Spans | None] = ContextVar("tessera_spans", default=None)


def marked(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The generate() of an engine's client, which tells the HTTP request that it is called for what its outputs say."""

    def generating(*args: Any, **options: Any) -> AsyncIterator[Any]:
        spans = _SPANS.get()
        outputs = generate(*args, **options)
        if spans is None:
            return outputs
        samples = next((each.n for each in (*args, *options.values()) if isinstance(getattr(each, "n", None), int)), 1)
        return _noting(outputs, spans, spans.next_prompt(), samples)

    return generating


async def _noting(outputs: Any, spans: Spans, prompt: int, samples: int) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            spans.note(prompt, samples, output)
            yield output


class WeightVersions:
    """ASGI middleware. A choice of a completion gets `weight_versions`, [{"version": "3", "start": 0, "end": 17}, ...],
    when it ends; each answer to a POST gets the header X-Weight-Version, the version that serves when it begins."""

    def __init__(self, app: Any, version: Callable[[], Awaitable[str]]) -> None:
        self._app = app
        self._version = version

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        spans = Spans()
        token = _SPANS.set(spans)
        try:
            await self._app(scope, receive, _Marking(send, spans, self._version).send)
        finally:
            _SPANS.reset(token)


class _Marking:
    """What is sent, with spans where they are known."""

    def __init__(self, send: Send, spans: Spans, version: Callable[[], Awaitable[str]]) -> None:
        self._send = send
        self._spans = spans
        self._version = version
        self._start: Message = {}
        self._kind = b""
        self._held = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._kind == b"application/json":
            await self._whole(message)
        elif message["type"] == "http.response.body" and self._kind == b"text/event-stream":
            await self._part(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        self._start, self._kind = message, headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if self._kind != b"application/json":
            message["headers"] = [*message.get("headers", ()), (HEADER, (await self._version()).encode())]
            await self._send(message)

    async def _whole(self, message: Message) -> None:
        self._held += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = bytes(self._held)
        if self._spans.of_choice:
            body = self._with_spans(body)
        version = await self._version()
        kept = [(name, value) for name, value in self._start.get("headers", ()) if name.lower() != b"content-length"]
        self._start["headers"] = [*kept, (b"content-length", str(len(body)).encode()), (HEADER, version.encode())]
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})

    async def _part(self, message: Message) -> None:
        """Passes on whole events."""
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        end = self._held.rfind(_EVENT) + len(_EVENT) if more else len(self._held)
        if more and end < len(_EVENT):
            return
        events, self._held = bytes(self._held[:end]), self._held[end:]
        if self._spans.of_choice:
            events = _EVENT.join(self._event(each) for each in events.split(_EVENT))
        await self._send({**message, "body": events})

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_DATA):
            return event
        return _DATA + self._with_spans(event[len(_DATA) :])

    def _with_spans(self, data: bytes) -> bytes:
        try:
            answer = json.loads(data)
        except ValueError:
            return data
        if not self._spans.put_into(answer):
            return data
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
