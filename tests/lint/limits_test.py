"""docs/limits.md and the constants of the code hold the same numbers.

    limits_test.py
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = "docs/limits.md"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1, "byte": 1, "s": 1, "ms": 1e-3, "h": 3600, "days": 86400}
DURATIONS = {"milliseconds": 1e-3, "seconds": 1, "minutes": 60, "hours": 3600}

# Row of the page (its first cell, or the beginning of it), a number in that row, and where the code has it.
LIMITS = [
    ("job, pair, batch, namespace", "64", "src/peer/identity.cc", r"name\.size\(\) > (\d+)"),
    ("tensor", "4,096", "src/bus/registration/manifest.h", "kMaxNameBytes"),
    ("text of a layout", "1 MiB", "src/bus/registration/layout_table.h", "kMaxLayoutText"),
    ("path of a Unix socket", "107", "src/base/socket.h", "kMaxPathBytes"),
    ("token of a store", "16", "src/store/token.h", "kMinBytes"),
    ("token of a store", "1,024", "src/store/token.h", "kMaxBytes"),
    ("dims of a tensor", "8", "include/tessera/layout.h", "kMaxDims"),
    ("axes of a mesh", "8", "include/tessera/layout.h", "kMaxAxes"),
    ("elements of a tensor", "2^62", "include/tessera/layout.h", "kMaxElements"),
    ("bytes of a tensor", "2^56", "src/plan/bind.cc", "kMaxBytes"),
    ("ranks of a mesh, and of a job", "2^20", "include/tessera/layout.h", "kMaxRanks"),
    ("ranks of a mesh, and of a job", "1,048,576", "src/peer/identity.h", "kMaxWorld"),
    ("intervals into which", "2^24", "include/tessera/layout.h", "kMaxIntervals"),
    ("ranks of all meshes", "2^24", "src/bus/registration/layout_table.cc", "kMaxLayoutRanks"),
    ("bounds of all ragged", "2^26", "src/bus/registration/layout_table.cc", "kMaxBounds"),
    ("pieces into which", "2^20", "src/bus/registration/local_tensors.cc", "kMaxRuns"),
    ("blocks cut by shards", "2^22", "src/bus/prepare/amax_messages.h", "kMaxAmaxes"),
    ("tensors of a batch", "2^22", "src/bus/registration/layout_table.h", "kMaxTensors"),
    ("tensors of a batch", "16 MiB", "include/tessera/store.h", "kMaxStoreValueBytes"),
    ("routes between two ranks", "2^24", "src/peer/exchange/messages.h", "kMaxRoutes"),
    ("memory regions", "2^14", "src/peer/exchange/messages.h", "kMaxKeys"),
    ("versions", "2^62 - 1", "include/tessera/bus.h", "kMaxVersion"),
    ("snapshots of a staged", "2", "src/bus/embedded.cc", r"batch_options\.snapshots < (\d+)"),
    ("snapshots of a staged", "8", "src/peer/exchange/messages.h", "kMaxSlots"),
    ("`Pair::all_gather`", "4 MiB", "include/tessera/bus.h", "kMaxGathered"),
    ("copy threads of a rank", "1,024", "src/bus/bus.cc", r"options\.threads > (\d+)"),
    ("`connect()`", "60 s", "python/tessera/_bus/bus.py", r"timeout: float = (\d+)"),
    ("`connect()`", "30 s", "python/tessera/tensor_bus.py", r"timeout: float = ([\d.]+)"),
    ("`connect()`", "30 days", "tools/job_options.cc", "kMaxTimeoutSeconds"),
    ("the same in C++", "300 s", "include/tessera/bus.h", "kRendezvousTimeout"),
    ("the same in C++", "30 days", "tools/job_options.cc", "kMaxTimeoutSeconds"),
    ("registering a batch", "300 s", "include/tessera/bus.h", "kRendezvousTimeout"),
    ("registering a batch", "30 s", "python/tessera/tensor_bus.py", r"timeout: float = ([\d.]+)"),
    ("registering a batch", "30 days", "tools/job_options.cc", "kMaxTimeoutSeconds"),
    ("`send()`", "30 s", "include/tessera/bus.h", "kTransferTimeout"),
    ("`send()`", "30 days", "tools/job_options.cc", "kMaxTimeoutSeconds"),
    ("`wait_peers()`", "300 s", "include/tessera/bus.h", "kRendezvousTimeout"),
    ("`wait_peers()`", "30 days", "tools/job_options.cc", "kMaxTimeoutSeconds"),
    ("a transfer that has begun", "30 s", "include/tessera/bus.h", "kTransferTimeout"),
    ("lease of a rank", "10 s", "src/bus/registration/rendezvous.cc", "kLeaseTtl"),
    ("handshake of two ranks", "10 s", "src/peer/connection_pool.cc", "kWelcomeTimeout"),
    ("handshake of two ranks", "3 s", "src/peer/connection_pool.cc", "kHelloTimeout"),
    ("handshake of two ranks", "10 s", "include/tessera/store.h", "kDefaultTimeout"),
    ("a key", "512", "include/tessera/store.h", "kMaxStoreKeyBytes"),
    ("a value", "16 MiB", "include/tessera/store.h", "kMaxStoreValueBytes"),
    ("compares and operations", "128", "include/tessera/store.h", "kMaxTransactionItems"),
    ("a request; a reply", "20 MiB", "src/store/protocol.h", "kMaxRequestBytes"),
    ("a request; a reply", "256 MiB", "src/store/protocol.h", "kMaxReplyBytes"),
    ("keys", "262,144", "src/store/limits.h", "kMaxKeys"),
    ("keys and values together", "1 GiB", "src/store/limits.h", "kMaxStoredBytes"),
    ("leases", "65,536", "src/store/limits.h", "kMaxLeases"),
    ("leases", "1 ms", "src/store/limits.h", "kMinTtl"),
    ("leases", "24 h", "src/store/limits.h", "kMaxTtl"),
    ("events kept", "4,096", "src/store/memory/state.h", "history_events"),
    ("events kept", "16 MiB", "src/store/memory/state.h", "history_bytes"),
    ("connections that have not identified", "256", "src/store/server/server.h", "max_greeting"),
    ("connections that have not identified", "5 s", "src/store/server/server.h", "greeting"),
    ("clients of the `auto` store", "65,536", "src/store/auto_host.cc", "kMaxMembers"),
    ("a message between two ranks", "256 MiB", "src/peer/message.h", "kMaxMessageBytes"),
    ("a message between a worker", "512 MiB", "src/bus/daemon/messages.h", "kMaxAgentFrame"),
    ("bytes that wait", "512 MiB", "src/peer/peer_connection.cc", "kMaxQueuedBytes"),
    ("descriptors of a message", "253", "src/base/socket.h", "kMaxFdsPerMessage"),
    ("commands under way", "4,096", "src/command/memory.h", "kMaxSlots"),
    ("connections to a rank", "256", "src/peer/connection_pool.cc", "kMaxUnknown"),
    ("connections to a rank", "256", "src/bus/daemon/daemon.cc", "kMaxConnections"),
    ("connections to a rank", "3 s", "src/peer/connection_pool.cc", "kHelloTimeout"),
    ("connections to a rank", "10 s", "src/bus/daemon/daemon.cc", "kRequestTimeout"),
    ("header of a safetensors file", "100,000,000", "src/checkpoint/safetensors_header.h", "kMaxHeaderBytes"),
    ("index of several files", "100,000,000", "src/checkpoint/checkpoint_index.cc", "kMaxIndexBytes"),
    ("index of several files", "16", "src/checkpoint/checkpoint_index.cc", "kMaxDepth"),
    ("batches with a series", "64", "src/base/metrics.h", "kMostBatches"),
    ("`tessera bench --size`", "1 MiB", "tools/bench/command.cc", "kLeastBytes"),
    ("`tessera bench --size`", "64 GiB", "tools/bench/command.cc", "kMostBytes"),
    ("log lines of an event", "20", "src/base/log.h", "kMost"),
    ("log lines of an event", "10 s", "src/base/log.h", "kPeriod"),
]
# Rows whose numbers are no constants of the code: requirements, formats, what another row has.
OTHERS = {
    "several hosts", "GPU memory", "etcd as the store", "encryption", "other systems", "system", "CPU", "compiler",
    "Python", "torch", "`f4` tensors", "destinations", "quantised on the way", "deltas", "size of a file",
    "trace files of a process",
}  # fmt: skip


def number_of(text):
    """Returns what a number of the page says, in bytes or seconds if it has a unit."""
    power = re.fullmatch(r"(\d+)\^(\d+)( - 1)?", text)
    if power:
        return int(power[1]) ** int(power[2]) - (1 if power[3] else 0)
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * UNITS.get(unit, 1)


def value_of(file, name):
    """Returns the value of a constant, or of the first group of a pattern, in bytes or seconds."""
    source = (ROOT / file).read_text()
    found = re.search(name if "(" in name else rf"\b{name} = ([^;,]+?)[;,]", source)
    assert found, f"{file} has no {name}"
    text = found[1].replace("'", "")
    text = re.sub(r"(?:std::chrono::)?(\w+)\(([\d.]+)\)", lambda m: f"({DURATIONS[m[1]]} * {m[2]})", text)
    text = re.sub(r"\b\w+\{(\d+)\}", r"\1", text)  # int64_t{1}
    text = re.sub(r"\b(\d+)u\b", r"\1", text)
    assert re.fullmatch(r"[\d\s.+\-*/<()e]+", text), f"{file}: {name} is {text}, which this test cannot read"
    return eval(text)  # a number: see above


def rows():
    """(first cell, the whole row) of all tables."""
    for line in (ROOT / PAGE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not set(line) <= set("|- "):
            yield cells[0], line


class Limits(unittest.TestCase):
    def test_each_number_is_the_codes(self):
        for row, number, file, name in LIMITS:
            with self.subTest(row=row, number=number, constant=name):
                lines = [line for first, line in rows() if first == row] or [line for first, line in rows() if first.startswith(row)]
                self.assertEqual(len(lines), 1, f"{PAGE} has {len(lines)} rows that begin with {row!r}")
                self.assertRegex(lines[0], rf"(?<![\d,.^]){re.escape(number)}(?![\d^])(?!,\d)")
                self.assertAlmostEqual(value_of(file, name), number_of(number))

    def test_no_row_with_a_number_is_forgotten(self):
        known = {row for row, *_ in LIMITS}
        for first, line in rows():
            if not re.search(r"\d", line) or first in OTHERS:
                continue
            with self.subTest(row=first):
                self.assertTrue(any(first == row or first.startswith(row) for row in known), f"{PAGE}: {line}")


if __name__ == "__main__":
    unittest.main()
