"""Starts a vLLM server and a trainer, and compares the server's answers with those of transformers for every version.

    python examples/vllm_live/run.py

Needs vLLM 0.32 for CPU (scripts/engines.sh has an environment with it). Exit status: 0; 1 answers differ, a request or
an update failed, or a job did; 130 interrupted.
"""

import argparse
import contextlib
import json
import pathlib
import socket
import sys
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from jobs import Job, drive, environment, torchrun

HERE = pathlib.Path(__file__).resolve().parent
TRAINERS, CLIENTS = 2, 2
PATIENCE = 1800  # seconds, for the server to start and for the trainer to end


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(model: pathlib.Path, port: int, options: argparse.Namespace) -> list[str]:
    """As a user types it, apart from what makes it small."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--weight-transfer-config", '{"backend": "tessera"}'),
        *("--tensor-parallel-size", str(options.tensor_parallel), "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "live", "--skip-tokenizer-init"),
        *("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"),
    ]


SERVER = {
    "VLLM_PLUGINS": "tessera",  # its routes, too
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def await_server(url: str, server: Job) -> None:
    from client import is_up

    deadline = time.monotonic() + PATIENCE
    while not is_up(url):
        server.require_alive()
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server is not up after {PATIENCE} s: {server.last_words()}")
        time.sleep(0.5)


def run(options: argparse.Namespace, folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    from client import Clients, probe
    from model import PROMPTS, save_untrained

    surroundings = environment("vllm-live", folder)
    start, kept = folder / "model", folder / "versions"
    kept.mkdir()
    save_untrained(start)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = Job("server", serve(start, port, options), surroundings | SERVER, options.quiet)
    stack.callback(server.end)
    await_server(url, server)
    before = probe(url, PROMPTS)
    clients = Clients(url, CLIENTS)
    course = ["--steps", str(options.steps), "--versions", str(options.versions), "--keep", str(kept)]
    command = torchrun(HERE / "train.py", TRAINERS, "--url", url, *course)
    trainer = Job("trainer", command, surroundings, options.quiet)
    stack.callback(trainer.end)
    trainer.wait(PATIENCE)
    traffic = clients.stop()
    server.require_alive()
    return compared(json.loads((kept / "versions.json").read_text()), before, traffic, kept, options)


def compared(
    versions: list[dict[str, Any]],
    before: dict[str, list[int]],
    traffic: dict[str, Any],
    kept: pathlib.Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    from check import agreement
    from model import decode

    problems = []
    expected = [options.steps * number for number in range(1, options.versions + 1)]
    if (sent := [entry["version"] for entry in versions]) != expected:
        problems.append(f"versions {sent} were sent, not {expected}")
    seen, last = [], before
    for entry in versions:
        if not entry["ok"]:
            problems.append(f"version {entry['version']}: {entry['error']}")
            continue
        found = agreement(kept / f"version-{entry['version']}.safetensors", entry["answers"])
        for prompt, each in found.items():
            if not each.well:
                which = f"{each.equal} of {each.counted} tokens that are certain"
                problems.append(f"version {entry['version']}: {prompt!r}: {which} are those of transformers")
        if entry["answers"] == last:
            problems.append(f"version {entry['version']} answers as the one before")
        last = entry["answers"]
        seen.append(
            {
                **{name: entry[name] for name in ("version", "loss", "pause")},
                "equal": sum(each.equal for each in found.values()),
                "counted": sum(each.counted for each in found.values()),
                "tokens": sum(map(len, last.values())),
                "answer": next(prompt + decode(tokens) for prompt, tokens in last.items()),
            }
        )
    if not any(entry["counted"] for entry in seen):
        problems.append("no token is certain enough to compare")
    if traffic["failures"] or not traffic["answers"]:
        problems.append(f"{traffic['answers']} requests were answered, and failed: {traffic['failures'][:3]}")
    return {"versions": seen, "traffic": traffic, "problems": problems}


def show(summary: dict[str, Any]) -> None:
    print(f"\n{'version':>7} {'loss':>7} {'pause':>8} {'equal tokens':>24}  an answer")
    for entry in summary["versions"]:
        equal = f"{entry['equal']} of {entry['tokens']}, {entry['counted']} certain"
        shown = "".join(each if each.isprintable() else "·" for each in entry["answer"])
        pause = f"{entry['pause'] * 1e3:.0f} ms"
        print(f"{entry['version']:>7} {entry['loss']:>7.3f} {pause:>8} {equal:>24}  {shown}")
    traffic = summary["traffic"]
    print(
        f"requests meanwhile: {traffic['answers']}, failed {len(traffic['failures'])}; "
        f"median {traffic['median'] * 1e3:.0f} ms, slowest {traffic['slowest'] * 1e3:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=5, help="to send")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks of the server")
    drive(parser, run, show)


if __name__ == "__main__":
    main()
