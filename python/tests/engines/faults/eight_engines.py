"""Eight engines of one trainer: `python eight_engines.py [--versions 30]`, in this folder.

Prints how long updates take in five of them, from the begin of send() until the server shows the version: first while
all eight are well, then while one is slow, one was killed and one comes late.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import threading
import time

if __name__ == "__main__":
    sys.path[:0] = map(str, pathlib.Path(__file__).resolve().parents[1:3])

from fault_ranks import LARGE
from fault_servers import LIMIT, Server, train
from jobs import Jobs

STEADY = ["steady0", "steady1", "steady2", "steady3", "steady4"]
OTHERS = ["slow", "killed", "late"]
DELAY = 0.3  # of each call of the slow one, which also stands still for most of the time


class Sluggish:
    """Stops a process for nine tenths of the time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(0.09)
            os.kill(self._pid, signal.SIGCONT)
            self._over.wait(0.01)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        os.kill(self._pid, signal.SIGCONT)


def measure(folder: pathlib.Path, versions: int, grace: float, trouble: bool) -> tuple[list[float], dict[str, int]]:
    """Seconds of each update of each steady engine, and the version that each engine shows at the end."""
    servers = {name: Server(folder, name, 1, model=LARGE) for name in STEADY + OTHERS}
    urls = {name: server.url for name, server in servers.items()}
    late = servers["late"]
    sluggish = None
    took: list[float] = []
    options = {"timeout": LIMIT, "grace": grace}
    try:
        with Jobs(folder, 3600.0, forked=True) as jobs:
            if trouble:
                late.refuses = True
                servers["slow"].delay = DELAY
            (trainer,) = jobs.start("trainer", train, urls, 0, options, LARGE)
            assert trainer.hear()[0] == "run"
            for version in range(1, versions + 1):
                if trouble and version == 2:
                    sluggish = Sluggish(servers["slow"].pid(0))
                if trouble and version == versions // 3:
                    servers["killed"].kill()
                if trouble and version == 2 * versions // 3:
                    late.refuses = False
                trainer.tell("sent")
                _, _, updates, (began, _) = trainer.hear()
                for name in STEADY:
                    assert updates[name][:2] == (True, version), updates[name]
                    if version > 1:  # with the first one layers are tried
                        took.append(servers[name].shown_at[str(version)] - began)
            if sluggish is not None:
                sluggish.close()
            servers["slow"].delay = 0.0
            while True:  # until the slow one has the newest, too
                trainer.tell("sent")
                _, _, updates, _ = trainer.hear()
                if all(updates[name][0] for name in urls if not trouble or name != "killed"):
                    break
                time.sleep(0.1)
            trainer.tell(None)
            trainer.result()
        return took, {name: int(server.shown) if server.shown.isdigit() else 0 for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--grace", type=float, default=0.2, help="more than an update of a steady engine takes")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    print(f"{'':34}{'median':>9}{'90 %':>9}{'longest':>9}  ms of an update of a steady engine; versions at the end")
    for _ in range(given.rounds):
        for trouble in (False, True):
            with tempfile.TemporaryDirectory(prefix="tessera-") as name:
                took, shown = measure(pathlib.Path(name), given.versions, given.grace, trouble)
            figures = [statistics.median(took), statistics.quantiles(took, n=10)[-1], max(took)]
            text = "".join(f"{1000 * each:9.1f}" for each in figures)
            title = "one slow, one killed, one late" if trouble else "all eight are well"
            print(f"{title:34}{text}  {', '.join(f'{name} {each}' for name, each in shown.items())}", flush=True)


if __name__ == "__main__":
    main()
