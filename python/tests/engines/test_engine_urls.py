"""URLs of engines, as users write them; no engine is needed."""

import types

import pytest
from tessera import InvalidArgumentError
from tessera.engines import sglang, vllm
from tessera.engines._urls import named_urls


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("http://proxy/engines/a/v1", "http://proxy/engines/a"),
        ("http://proxy/v1beta", "http://proxy/v1beta"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        (" HTTPS://node-3.cluster ", "https://node-3.cluster"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_is_taken_as_it_is_meant(url, taken):
    assert named_urls(url, "vLLM") == {"engine0": taken}
    assert named_urls([url], "vLLM") == {"engine0": taken}
    assert named_urls({"a": url}, "vLLM") == {"a": taken}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://localhost", "'ftp'"),
        ("tcp://localhost:1", "'tcp'"),
        ("http://", "no host"),
        ("", "no host"),
        ("http://a b", "no host"),
        ("http://a:70000", "Port out of range"),
        ("http://a:port", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://user:secret@a", "password"),
        ("http://a/?x=1", "more than a path"),
        ("http://a/#x", "more than a path"),
        (8000, "give http://HOST:PORT"),
        (None, "give http://HOST:PORT"),
    ],
)
def test_what_is_no_url_is_refused_by_name(url, why):
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        named_urls({"policy": url}, "vLLM")
    assert "'policy'" in str(caught.value)


@pytest.mark.parametrize("engines", [{}, [], None, 3, b"http://a", iter(())])
def test_what_are_no_engines_is_refused(engines):
    with pytest.raises(InvalidArgumentError, match=r"^engines=.*: give {name: URL of a vLLM server}, a URL, or a list"):
        named_urls(engines, "vLLM")


def test_names_of_several_are_counted_or_given():
    assert named_urls(("http://a", "b:1"), "vLLM") == {"engine0": "http://a", "engine1": "http://b:1"}
    assert named_urls(types.MappingProxyType({"x": "a"}), "vLLM") == {"x": "http://a"}
    with pytest.raises(InvalidArgumentError, match="the name 1 of 'http://a' is no text"):
        named_urls({1: "http://a"}, "vLLM")


@pytest.mark.parametrize("second", ["http://a:8000", "a:8000/v1", "HTTP://A:8000/"])
def test_one_server_under_two_names_is_refused(second):
    with pytest.raises(InvalidArgumentError, match="'x' and 'y' are one server, .*://.*:8000: name each server once"):
        named_urls({"x": "http://a:8000", "y": second}, "vLLM")
    assert len(named_urls({"x": "http://a/1", "y": "http://a/2", "z": "https://a/1"}, "vLLM")) == 3


@pytest.mark.parametrize("kind", [vllm.Trainer, sglang.Trainer])
def test_trainers_look_at_them_before_they_join_the_bus(kind):
    with pytest.raises(InvalidArgumentError, match="'ftp'"):
        kind({}, {"a": "ftp://x"}, rank=0, world=1)
