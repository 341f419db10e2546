"""Marks of versions in the answers of a server; no vLLM is needed."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from tessera.engines.vllm._versions import WeightVersions, marked


def output(index, *spans):
    made = [SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans]
    return SimpleNamespace(outputs=[SimpleNamespace(index=index, weight_versions=made or None)])


def as_json(*spans):
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


async def shown():
    return "9"


async def respond(app, method="POST"):
    """Status, headers and the body's parts of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    await WeightVersions(app, shown)({"type": "http", "method": method}, None, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return headers, [message["body"] for message in sent[1:]]


def app_of(outputs, parts, kind="application/json", samples=1):
    """An app that generates `outputs`, a list for each prompt, then answers with `parts`."""

    async def generate(prompt, params, request_id):
        for each in outputs[prompt]:
            yield each

    engine = marked(generate)

    async def app(scope, receive, send):
        calls = [engine(i, SimpleNamespace(n=samples), request_id=f"r-{i}") for i in range(len(outputs))]
        for call in reversed(calls):  # their order is that of the calls, not of what comes first
            async for _ in call:
                pass
        length = (b"content-length", str(sum(map(len, parts))).encode())
        headers = [(b"content-type", kind.encode() + b"; charset=utf-8")] + ([length] if kind.endswith("json") else [])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i + 1 < len(parts)})

    return app


def body_of(*indices, reason="stop"):
    return json.dumps(
        {"id": "x", "choices": [{"index": i, "text": "é", "finish_reason": reason} for i in indices]}
    ).encode()


def test_each_choice_of_an_answer_says_which_tokens_are_of_which_version():
    spans = [[output(0), output(0, ("1", 0, 4))], [output(0, ("1", 0, 2), ("2", 2, 9))]]
    headers, [body] = asyncio.run(respond(app_of(spans, [body_of(0, 1)])))
    choices = json.loads(body)["choices"]
    assert [each["weight_versions"] for each in choices] == [as_json(("1", 0, 4)), as_json(("1", 0, 2), ("2", 2, 9))]
    assert headers["content-length"] == str(len(body)) and choices[0]["text"] == "é"
    assert headers["x-weight-version"] == "9"


def test_several_samples_of_several_prompts_are_told_apart():
    spans = [[output(0, ("1", 0, 1)), output(1, ("2", 0, 1))], [output(0, ("3", 0, 1)), output(1, ("4", 0, 1))]]
    _, [body] = asyncio.run(respond(app_of(spans, [body_of(3, 2, 1, 0)], samples=2)))
    found = {each["index"]: each["weight_versions"][0]["version"] for each in json.loads(body)["choices"]}
    assert found == {0: "1", 1: "2", 2: "3", 3: "4"}


def test_a_body_that_comes_in_parts_is_put_together():
    whole = body_of(0)
    parts = [whole[:7], whole[7:30], whole[30:]]
    _, bodies = asyncio.run(respond(app_of([[output(0, ("5", 0, 3))]], parts)))
    assert len(bodies) == 1 and json.loads(bodies[0])["choices"][0]["weight_versions"] == as_json(("5", 0, 3))


def test_the_last_event_of_a_choice_has_its_versions():
    events = [b"data: " + body_of(0, reason=None) + b"\n\n", b"data: " + body_of(0) + b"\n\n", b"data: [DONE]\n\n"]
    stream = b"".join(events)
    parts = [stream[i : i + 11] for i in range(0, len(stream), 11)]  # which are not events
    headers, bodies = asyncio.run(respond(app_of([[output(0, ("1", 0, 3), ("2", 3, 4))]], parts, "text/event-stream")))
    found = b"".join(bodies).split(b"\n\n")
    assert found[0] + b"\n\n" == events[0] and found[2:] == [b"data: [DONE]", b""]
    choice = json.loads(found[1].removeprefix(b"data: "))["choices"][0]
    assert choice["weight_versions"] == as_json(("1", 0, 3), ("2", 3, 4)) and choice["text"] == "é"
    assert headers["x-weight-version"] == "9"


def test_an_event_is_passed_on_when_it_is_whole():
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\ndata: 2", "more_body": True})
        seen.append("later")
        await send({"type": "http.response.body", "body": b"\n\n", "more_body": False})

    async def send(message):
        seen.append(message.get("body"))

    asyncio.run(WeightVersions(app, shown)({"type": "http", "method": "POST"}, None, send))
    assert seen == [None, b"data: 1\n\n", "later", b"data: 2\n\n"]


@pytest.mark.parametrize("body", [b'{"error": {"code": 400}}', b"[1]", b"not json", b'{"choices": 3}', b""])
def test_what_has_no_choices_is_left_as_it_is(body):
    headers, bodies = asyncio.run(respond(app_of([[output(0, ("1", 0, 1))]], [body])))
    assert b"".join(bodies) == body and headers["content-length"] == str(len(body))


def test_without_spans_only_the_header_is_new():
    headers, [body] = asyncio.run(respond(app_of([[output(0)]], [body_of(0)])))
    assert body == body_of(0) and headers["x-weight-version"] == "9"


def test_other_methods_and_other_callers_are_not_touched():
    headers, [body] = asyncio.run(respond(app_of([], [b"{}"]), method="GET"))
    assert "x-weight-version" not in headers and body == b"{}"

    async def generate(*args):
        yield output(0, ("1", 0, 1))

    async def run():  # such as the server's own warm-up
        return [each async for each in marked(generate)("p")]

    assert len(asyncio.run(run())) == 1


def test_requests_at_a_time_do_not_mix():
    async def run():
        apps = [app_of([[output(0, (str(i), 0, 1))]], [body_of(0)]) for i in range(20)]
        return await asyncio.gather(*(respond(app) for app in apps))

    found = [json.loads(body)["choices"][0]["weight_versions"][0]["version"] for _, [body] in asyncio.run(run())]
    assert found == [str(i) for i in range(20)]


def test_a_caller_that_leaves_ends_the_generation():
    ended = []

    async def generate(*args):
        try:
            while True:
                yield output(0)
        finally:
            ended.append(True)

    async def app(scope, receive, send):
        outputs = engine("p")
        async for _ in outputs:
            break
        await outputs.aclose()
        assert ended == [True]
        await send({"type": "http.response.start", "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    engine = marked(generate)
    asyncio.run(respond(app))
    assert ended == [True]
