"""The receiving job: one process that writes a text with every version of the weights, until the trainer has ended.

    python examples/generate/infer.py

Version 0 has random weights.
"""

import argparse
import json
import pathlib
from typing import Any

import tessera
from model import bits_per_byte, generate, untrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file for what was written")
    options = parser.parse_args()
    model = untrained().eval()
    written: list[dict[str, Any]] = []

    def write(version: int) -> None:
        bits, text = bits_per_byte(model), generate(model)
        written.append({"version": version, "bits_per_byte": bits, "text": text})
        print(f"--- version {version}, {bits:.2f} bits per byte\n{text}", flush=True)

    write(0)
    with tessera.connect("weights", role="inference", peer="trainer", timeout=600) as bus:
        batch = bus.register(model)
        while True:
            try:
                version = batch.recv(timeout=600)
            except tessera.PeerLostError:  # the trainer has closed its end
                break
            write(version)
    if options.json:
        options.json.write_text(json.dumps(written))


if __name__ == "__main__":
    main()
