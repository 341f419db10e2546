"""The basis of tests of the `tessera` command: real processes in a temporary folder, and checkpoints.

Uses only the standard library; checkpoints are written and read by hand.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

TESSERA = None
HANG = 60  # seconds; sanitizers are slow
LAUNCHERS = ("TESSERA_RANK", "TESSERA_WORLD_SIZE", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


def write_safetensors(path, tensors, header=None):
    """tensors: name -> (dtype, shape, bytes)."""
    entries, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = header if header is not None else json.dumps(entries).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = header.pop("__metadata__", {})
    return metadata, {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}


def floats(count, scale=1.0):
    return struct.pack(f"<{count}f", *(scale * i for i in range(count)))


class CommandTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-cli-")
        self.path = pathlib.Path(self.folder.name)
        self.environment = dict(os.environ, TESSERA_RUNTIME_DIR=str(self.path / "run"))
        for secret in ("TESSERA_TOKEN", "TESSERA_TOKEN_FILE"):
            self.environment.pop(secret, None)
        self.processes = []
        self.model = self.path / "model.safetensors"
        write_safetensors(self.model, {
            "w": ("F32", [6, 8], floats(48)),
            "bias": ("F32", [8], floats(8, 0.5)),
            "steps": ("I64", [], struct.pack("<q", 7)),
            "none": ("F32", [0, 4], b""),
        })

    def tearDown(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.folder.cleanup()

    def start(self, *arguments, program=None):
        process = subprocess.Popen([program or TESSERA, *map(str, arguments)], env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def finish(self, process, timeout=HANG):
        output, errors = process.communicate(timeout=timeout)
        return process.returncode, output, errors

    def line(self, process, stream="stdout"):
        """The next line that it writes. The test fails, and shows what else it wrote, if there is none in time."""
        alarm = threading.Timer(HANG, process.kill)
        alarm.start()
        try:
            line = getattr(process, stream).readline()
        finally:
            alarm.cancel()
        if not line:
            process.kill()
            self.fail(f"no line on {stream} of {process.args}, but {self.finish(process)}")
        return line

    def free_address(self):
        """A HOST:PORT that nobody gets by chance while its server is down: below the ports that the kernel chooses."""
        lowest = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        while True:
            port = random.randrange(10_000, lowest)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return f"127.0.0.1:{port}"

    def run_command(self, *arguments):
        return self.finish(self.start(*arguments))

    def sender(self, rank=0, world=1, layout=".*=1:R", checkpoints=None, *more):
        files = [part for path in (checkpoints or [self.model]) for part in ("--checkpoint", path)]
        return self.start("send", "--job", "trainer", "--peer", "inference", "--rank", rank, "--world", world,
                          "--layout", layout, "--timeout", HANG, "--json", *files, *more)

    def receiver(self, rank=0, world=1, layout=".*=1:R", *more):
        return self.start("recv", "--job", "inference", "--peer", "trainer", "--rank", rank, "--world", world,
                          "--layout", layout, "--timeout", HANG, "--json", *more)

    def stop(self, process):
        """Stops a process; returns once all its threads stand still."""
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + HANG
        while not all(stat.read_text().rpartition(") ")[2].startswith("T")
                      for stat in pathlib.Path(f"/proc/{process.pid}/task").glob("*/stat")):
            self.assertLess(time.monotonic(), deadline, f"process {process.pid} goes on")
            time.sleep(0.01)

    def wait_for(self, folder, pattern):
        deadline = time.monotonic() + HANG
        while not list(folder.glob(pattern)):
            self.assertLess(time.monotonic(), deadline, f"no {pattern} in {folder}")
            time.sleep(0.01)

    def assert_one_line(self, result, status, *texts):
        code, _, errors = result
        self.assertEqual(code, status, errors)
        lines = [line for line in errors.splitlines() if line.startswith("tessera: ")]
        self.assertEqual(len(lines), 1, errors)
        for text in texts:
            self.assertIn(text, lines[0])


def main():
    global TESSERA
    TESSERA = sys.argv.pop(1)
    unittest.main()
