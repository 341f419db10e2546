"""The log lines of a batch's registrations: each has the figures of its own session."""

from __future__ import annotations

import os
import re
import subprocess
import sys

PROGRAM = """
import threading, time, tessera, torch

def engine(name):
    with tessera.connect("events", role=name, peer="trainer", rank=0, world=1) as bus:
        bus.register({"w": torch.zeros(4)}).recv(timeout=60)
        left[name].wait(60)

names = ["first", "second", "third"]
left = {name: threading.Event() for name in names}
with tessera.connect("events", role="trainer", peer=names, rank=0, world=1) as bus:
    batch = bus.register({"w": torch.zeros(4)}, mode="staged", direction="send")
    threads = []
    for number, name in enumerate(names):
        threads.append(threading.Thread(target=engine, args=[name]))
        threads[-1].start()
        batch.send(version=number + 1)
        batch.wait_peers(1, version=number + 1, timeout=60)
        left[name].set()
        threads[-1].join(60)
"""


def test_seconds_are_those_of_each_session_and_short() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TESSERA_LOG": "info", "TESSERA_LOG_FORMAT": "logfmt"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    of_trainer = [line for line in found.stderr.splitlines() if " job=trainer " in line]
    first = [line for line in of_trainer if "event=batch.registered " in line]
    again = [line for line in of_trainer if "event=batch.registered_again " in line]
    assert len(first) == 1, found.stderr
    assert len(again) == 2, found.stderr
    seconds = [re.search(r"\bseconds=(\S+)", line)[1] for line in [*first, *again]]  # type: ignore[index]
    assert len(set(seconds)) == 3, seconds
    assert all(len(re.sub(r"e.*|\D", "", text).lstrip("0")) <= 6 for text in seconds), seconds
    # Every line has an event, and no float has more than six digits.
    for line in found.stderr.splitlines():
        if line.startswith("ts="):
            assert " event=" in line, line
