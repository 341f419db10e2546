"""What /metrics of a vLLM server says of its weights."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram


class Metrics:
    """Made once in the process of the HTTP server."""

    def __init__(self) -> None:
        self._version = Gauge(
            "tessera:weight_version", "Version of the weights that serve.", multiprocess_mode="mostrecent"
        )
        self._updates = Counter("tessera:weight_updates", "Updates of weights, by outcome.", ["outcome"])
        self._pause = Histogram(
            "tessera:weight_update_pause_seconds",
            "Time in which no request ran.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )

    def show(self, version: int) -> None:
        self._version.set(version)

    def count(self, is_done: bool, pause: float) -> None:
        self._updates.labels("installed" if is_done else "failed").inc()
        self._pause.observe(pause)
