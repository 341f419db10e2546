"""How to ask a vLLM server, and clients that keep asking."""

import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse
from typing import Any

from model import LENGTH, encode, text

MODEL = "live"
PATIENCE = 300  # seconds for an answer
PROMPT = 32  # bytes of text that a client asks to continue


def complete(url: str, prompt: list[int], length: int = LENGTH) -> list[int]:
    """The most likely next tokens. Raises RuntimeError for any other answer than these."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = answer.read()
    finally:
        connection.close()
    tokens = json.loads(found)["choices"][0].get("token_ids") if answer.status == 200 else None
    if tokens is None or len(tokens) != length:
        raise RuntimeError(f"{url} answered {answer.status}: {found[:500]!r}")
    return list(tokens)


def is_up(url: str) -> bool:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Clients:
    """Threads that ask until stop(), one request after another. None may fail."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._whole = text()
        self._stopping = threading.Event()
        self._seconds: list[float] = []
        self._failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self._stopping.is_set():
            begin = chosen.randrange(len(self._whole) - PROMPT)
            asked = time.monotonic()
            try:
                complete(self._url, self._whole[begin : begin + PROMPT].tolist())
            except (OSError, ValueError, RuntimeError, http.client.HTTPException) as error:
                self._failures.append(f"{type(error).__name__}: {error}")
                self._stopping.wait(1)
            else:
                self._seconds.append(time.monotonic() - asked)

    def stop(self) -> dict[str, Any]:
        """How many answers there were, and what failed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        seconds = self._seconds or [float("nan")]
        return {
            "answers": len(self._seconds),
            "failures": self._failures,
            "median": statistics.median(seconds),
            "slowest": max(seconds),
        }


def probe(url: str, prompts: tuple[str, ...]) -> dict[str, list[int]]:
    return {prompt: complete(url, encode(prompt).tolist()) for prompt in prompts}
