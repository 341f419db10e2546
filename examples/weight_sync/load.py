"""A load generator: clients that keep asking while versions are swapped, and count errors.

    python examples/weight_sync/load.py --url http://127.0.0.1:8000 --seconds 10

Each client knows the version of its last answer, and which trainer sent it: no later answer may be of an older version
of that trainer, or of an earlier trainer. It sends one sentence again and again: if two answers of one version differ,
one of them has mixed it with another version.
"""

import argparse
import http.client
import json
import pathlib
import random
import signal
import statistics
import sys
import threading
import time
import urllib.parse
from typing import Any, NamedTuple

from text import pairs

PROBE = "The same sentence is asked for again and again."
TOLERANCE = 2e-2  # for an element of the probe's vector: padding changes the rounding, most of all in bf16


class Version(NamedTuple):
    """In the order in which a server takes them. It counts its trainers; 0 has sent nothing."""

    trainer: int
    number: int

    def __str__(self) -> str:
        return f"version {self.number} of trainer {self.trainer}"


def ask(connection: http.client.HTTPConnection, texts: list[str]) -> tuple[Version, list[list[float]]]:
    """The version that answered, and a vector for each text. Raises OSError or ValueError without an answer."""
    connection.request("POST", "/embed", json.dumps({"sentences": texts}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = json.loads(response.read())
    if response.status != 200:
        raise ValueError(f"status {response.status}: {body}")
    return Version(body["trainer"], body["version"]), body["embeddings"]


def connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)


class Load:
    """Clients of one server, each in a thread."""

    def __init__(self, url: str, clients: int, rate: float) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._latencies: list[float] = []
        self._answers: dict[Version, int] = {}  # by version
        self._probes: dict[Version, list[float]] = {}  # the first vector for each version
        self._spread = 0.0
        self._failures: list[str] = []
        self._text = [sentence for pair in pairs() for sentence in pair]
        self._threads = [
            threading.Thread(target=self._client, args=(url, clients / rate, number)) for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> dict[str, Any]:
        """Ends the clients; returns what they have seen."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        milliseconds = sorted(1e3 * latency for latency in self._latencies) or [0.0]
        return {
            "requests": len(self._latencies) + len(self._failures),
            "failed": len(self._failures),
            "failures": self._failures[:5],
            "answers": [
                {"trainer": trainer, "version": version, "count": count}
                for (trainer, version), count in sorted(self._answers.items())
            ],
            "spread": self._spread,
            "latency_ms": {"median": statistics.median(milliseconds), "max": milliseconds[-1]},
        }

    def _client(self, url: str, interval: float, number: int) -> None:
        chosen = random.Random(number)
        held = Version(0, 0)
        connection = connect(url)
        while not self._stop.is_set():
            begin = time.perf_counter()
            try:
                version, vectors = ask(connection, [PROBE, *chosen.sample(self._text, chosen.randint(0, 2))])
                if version < held:
                    raise ValueError(f"{version} after {held}")
                held = version
                self._count(version, vectors[0], time.perf_counter() - begin)
            except Exception as error:  # in any case the request has failed
                with self._lock:
                    self._failures.append(f"{type(error).__name__}: {error}")
                connection.close()  # the next request opens it again
            self._stop.wait(begin + interval - time.perf_counter())
        connection.close()

    def _count(self, version: Version, probe: list[float], latency: float) -> None:
        with self._lock:
            first = self._probes.setdefault(version, probe)
            spread = max(abs(a - b) for a, b in zip(first, probe, strict=True))
            if spread > TOLERANCE:
                raise ValueError(f"two answers of {version} differ by {spread}")
            self._spread = max(self._spread, spread)
            self._answers[version] = self._answers.get(version, 0) + 1
            self._latencies.append(latency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rate", type=float, default=5, help="requests a second, of all clients")
    parser.add_argument("--seconds", type=float, default=60, help="less on Ctrl-C")
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary; else it is printed")
    options = parser.parse_args()

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    load = Load(options.url, options.clients, options.rate)
    ended.wait(options.seconds)
    seen = load.stop()
    if options.json:
        options.json.write_text(json.dumps(seen))
    else:
        print(json.dumps(seen, indent=2))
    sys.exit(1 if seen["failed"] else 0)


if __name__ == "__main__":
    main()
