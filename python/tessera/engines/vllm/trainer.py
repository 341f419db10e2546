"""The training side of vLLM servers."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._bus.bus import connect
from ..._closing import Closing
from ..._errors import InvalidArgumentError, UnavailableError

_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class EngineUpdate:
    """What came of an update in one server.

    Attributes:
        ok: Whether all its ranks serve the new version. If not, all serve the one before; or the server is left paused,
            which `error` then says, as a copy into place has failed for good. The next send() ends it.
        version: The version that it serves; None if it does not answer.
        error: Why not.
        pause: Seconds in which no request ran.
    """

    ok: bool
    version: int | None
    error: str = ""
    pause: float = 0.0
    ranks: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


class Trainer(Closing):
    """Sends a model's weights to vLLM servers; every rank of the trainer makes one and calls send()::

        trainer = tessera.engines.vllm.Trainer(model, {"engine0": "http://localhost:8000"})
        for batch in data:
            ...
            updates = trainer.send()     # {"engine0": EngineUpdate(ok=True, version=1, ...)}

    Weights may be DTensors in any layout: nothing is gathered. Names are those of the checkpoint that the server would
    load; `map` says where a model's differ. A server that is slow, fails or is gone delays and harms no other one.
    """

    def __init__(
        self,
        model: Any,
        engines: Mapping[str, str],
        *,
        pair: str = "weights",
        role: str = "trainer",
        store: str | None = None,
        rank: int | None = None,
        world: int | None = None,
        batch: str = "default",
        timeout: float = 60,
        pause: str = "keep",
        **options: Any,
    ) -> None:
        """Joins the bus and makes the servers meet this job. Collective over the trainer's ranks.

        Args:
            model: A torch module, or {name: tensor}.
            engines: The servers' URLs, by the names that their jobs get on the bus. They need VLLM_SERVER_DEV_MODE=1
                and tessera.engines.vllm.worker.Extension.
            pause: What happens to running requests while weights are installed, as in vLLM's /pause: "keep", "wait" or
                "abort".
            options: Of Bus.register(), such as map=, wire= and delta=.

        Raises:
            UnavailableError: A server does not answer, or refuses; it names it.
        """
        if not engines:
            raise InvalidArgumentError("engines={}: give {name: URL of a vLLM server}")
        self._engines = dict(engines)
        self._timeout = timeout
        self._pause = pause
        self._bus = connect(pair, role=role, peer=list(engines), store=store, rank=rank, world=world, timeout=timeout)
        try:
            self._batch = self._bus.register(model, batch, "staged", direction="send", timeout=timeout, **options)
            self._leads = self._bus.rank == 0
            init = {"pair": pair, "trainer": role, "store": store, "batch": batch, "timeout": timeout}
            if "wire" in options:
                init["wire"] = options["wire"]
            if "delta" in options:
                init["delta"] = options["delta"]
            if self._leads:
                self._each(lambda name, url: self._begin(name, url, init))
        except BaseException:
            self._bus.close()
            raise

    def _begin(self, name: str, url: str, init: Mapping[str, Any]) -> None:
        self._post(url, "init_weight_transfer_engine", {"init_info": {**init, "engine": name}})

    def send(self, version: int | None = None) -> dict[str, EngineUpdate]:
        """Sends a version, and has every server install it. Collective; the model may be changed once it returns.

        Returns what came of it by server on rank 0, and {} on the other ranks. Does not raise for a server that fails.
        """
        sent = self._batch.send(version).wait()
        if not self._leads:
            return {}
        return self._each(lambda name, url: self._update(url, sent))

    def _each(self, work: Any) -> dict[str, Any]:
        with concurrent.futures.ThreadPoolExecutor(len(self._engines), "tessera-vllm") as pool:
            running = {name: pool.submit(work, name, url) for name, url in self._engines.items()}
            return {name: each.result() for name, each in running.items()}

    def _update(self, url: str, version: int) -> EngineUpdate:
        try:
            self._call(url, "tessera_receive", [version, self._timeout])
            end = time.monotonic() + self._timeout + 1
            while any(each["receiving"] for each in self._call(url, "tessera_status", [])):
                if time.monotonic() > end:
                    raise UnavailableError(f"{url}: version {version} was not received in {self._timeout} s")
                time.sleep(_POLL_SECONDS)
            return self._install(url, version)
        except UnavailableError as error:
            return EngineUpdate(False, None, str(error))

    def _install(self, url: str, version: int) -> EngineUpdate:
        began = time.monotonic()
        self._post(url, f"pause?mode={self._pause}")
        torn = False
        try:
            ranks = self._call(url, "tessera_commit", [])
            torn = any(each["torn"] for each in ranks)
        finally:
            if not torn:
                self._post(url, "resume")
        pause = time.monotonic() - began
        failed = [each["verdict"] for each in ranks if not each["verdict"]["ok"]]
        serves = min(each["version"] for each in ranks)
        if failed:
            first = min(failed, key=lambda verdict: verdict["error"] == "another rank failed")
            left = "; weights of two versions are mixed, and the server is left paused" if torn else ""
            return EngineUpdate(False, serves, f"rank {first['rank']}: {first['error']}{left}", pause, tuple(ranks))
        self._post(url, "update_weight_version", {"new_version": str(serves)})
        behind = "" if serves >= version else f"it took version {serves}, which was on its way, and not {version}"
        return EngineUpdate(not behind, serves, behind, pause, tuple(ranks))

    def _call(self, url: str, method: str, args: list[Any]) -> list[dict[str, Any]]:
        answer = self._post(url, "collective_rpc", {"method": method, "args": args})
        results = answer.get("results")
        if not isinstance(results, list) or not results or not all(map(_is_status, results)):
            raise UnavailableError(f"{url}: {method} answered {str(answer)[:500]}")
        if method == "tessera_commit" and any(each["verdict"] is None for each in results):
            raise UnavailableError(f"{url}: {method} answered without a verdict")
        return results

    def _post(self, url: str, path: str, body: Any = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(
            f"{url.rstrip('/')}/{path}", data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout + 10) as answer:
                found = json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise UnavailableError(f"{url}/{path} answered {error.code}: {detail}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnavailableError(f"{url}/{path}: {error}") from None
        if not isinstance(found, dict):
            raise UnavailableError(f"{url}/{path} answered {str(found)[:500]}")
        return found

    def close(self) -> None:
        """Leaves the bus. Servers go on with what they have."""
        self._bus.close()

    @property
    def closed(self) -> bool:
        return self._bus.closed


_FIELDS = {"version": int, "receiving": bool, "torn": bool, "verdict": dict | None}
_VERDICT = {"ok": bool, "rank": int, "error": str}


def _is_status(answer: Any) -> bool:
    """Whether a worker has answered with its status(), and not with something else."""

    def has(fields: Mapping[str, Any], found: Any) -> bool:
        return isinstance(found, dict) and all(isinstance(found.get(name, has), kind) for name, kind in fields.items())

    return has(_FIELDS, answer) and (answer["verdict"] is None or has(_VERDICT, answer["verdict"]))
