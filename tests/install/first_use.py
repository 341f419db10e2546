"""What a user does first with the installed package: imports it, moves tensors between two processes, asks the doctor,
and, with torch, trains a model that two processes share.

    first_use.py FOLDER [TORCH]

FOLDER is where the package must have come from, TORCH how the version of torch begins that must be there; without it, torch
must not be. Uses only the package and NumPy, so that it runs on a system that has nothing else.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

LIMIT = 60  # seconds; a machine may be busy
# What a Python package may ask of a Linux system (PEP 600): glibc's libraries and GCC's for exceptions.
SYSTEM = {"libc", "libm", "libdl", "librt", "libpthread", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}


def libraries() -> set[str]:
    """The shared libraries that this process has loaded."""
    names = (line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines())
    return {name for name in names if ".so" in name}


def stem(library: str) -> str:
    """The library's name: libc for /lib/libc.so.6, and for /lib/libc-2.31.so of older systems."""
    return re.sub(r"(-2\.\d+)?\.so.*", "", library.rpartition("/")[2])


def trainer(store: str, wanted: str) -> None:
    """Sends twelve rows of numbers, as a torch tensor if there is torch."""
    import numpy
    import tessera

    rows = numpy.arange(96, dtype=numpy.float32).reshape(12, 8)
    tensor = __import__("torch").from_numpy(rows) if wanted else rows
    with tessera.connect("weights", role="trainer", peer="inference", store=store, rank=0, world=1, timeout=LIMIT) as bus:
        bus.register({"rows": tensor}).send(version=7, timeout=LIMIT)


def inference(store: str, wanted: str) -> None:
    """Receives them in f16, and checks each."""
    import numpy
    import tessera

    torch = __import__("torch") if wanted else None
    rows = torch.zeros(12, 8, dtype=torch.float16) if torch else numpy.zeros((12, 8), numpy.float16)
    with tessera.connect("weights", role="inference", peer="trainer", store=store, rank=0, world=1, timeout=LIMIT) as bus:
        assert bus.register({"rows": rows}).recv(timeout=LIMIT) == 7
    received = rows.numpy() if torch else rows
    assert (received == numpy.arange(96).reshape(12, 8)).all(), received


def trained(torch, model, micro_batches: list[list[int]], scale: float) -> None:
    """A step of AdamW for each list, the second of which differentiates with respect to one weight only."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step, numbers in enumerate(micro_batches):
        for number in numbers:
            x = torch.arange(8) + number
            loss = model(x).square().mean() * scale
            loss.backward(inputs=[model[1].weight] if step == 1 else None)
        optimizer.step()
        optimizer.zero_grad()


def rank(store: str, number: str) -> None:
    """One of two that share a model: its weights become those of plain torch in one process."""
    import torch
    from tessera import etp

    torch.set_num_threads(1)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Embedding(16, 64), torch.nn.Linear(64, 64), torch.nn.GELU()))
    plain, model = models
    trained(torch, plain, [[0, 1], [2, 3], [4, 5]], 0.5)
    with etp.init_group(store=store, rank=int(number), size=2, timeout=LIMIT) as group:
        etp.shard_module_(model, group, min_elements=0)
        trained(torch, model, [[int(number) + 2 * step] for step in range(3)], 1.0)
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(etp.whole(ours), theirs), (ours, theirs)


def import_it(folder: str, wanted: str) -> None:
    """Checks the import: its place, version and libraries, and that it does not import torch."""
    import asyncio  # noqa: F401  brings Python's own OpenSSL
    import numpy  # noqa: F401  likewise its libraries

    before = libraries()
    import tessera

    assert pathlib.Path(tessera.__file__).is_relative_to(folder), (tessera.__file__, folder)
    assert importlib.metadata.version("tessera-tensors") == tessera.__version__
    assert "torch" not in sys.modules
    own = (folder, f"{sys.base_prefix}/lib/python")
    foreign = {name for name in libraries() - before if not name.startswith(own) and stem(name) not in SYSTEM}
    assert not foreign, f"the module brings libraries of the system in: {foreign}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    assert version.startswith(wanted) if wanted else not version, f"torch {version or 'is not there'}, wanted: {wanted or 'none'}"
    print(f"tessera {tessera.__version__}, Python {sys.version.split()[0]}, torch {version or 'none'}")


def move(store: str, wanted: str) -> None:
    """Transfers tensors between two processes through `store`."""
    both([("trainer", store, wanted), ("inference", store, wanted)])


def both(processes: list[tuple[str, str, str]]) -> None:
    """Runs actions of this program beside each other."""
    ends = [subprocess.Popen([sys.executable, __file__, *each]) for each in processes]
    try:
        assert [end.wait(2 * LIMIT) for end in ends] == [0, 0]
    finally:
        for end in ends:
            end.kill()
            end.wait()


def main(folder: str, wanted: str = "") -> None:
    import_it(str(pathlib.Path(folder).resolve()), wanted)
    command = [str(pathlib.Path(sys.executable).with_name("tessera"))]
    with tempfile.TemporaryDirectory() as work:
        os.environ["TESSERA_RUNTIME_DIR"] = f"{work}/run"
        move("auto", wanted)
        if wanted:
            both([("rank", "auto", "0"), ("rank", "auto", "1")])
        # `tessera store` uses OpenSSL (for proofs) and SQLite (for its file).
        serving = [*command, "store", "--listen", "127.0.0.1:0", "--json", "--data", f"{work}/state"]
        os.mkdir(f"{work}/state")
        with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as store:
            try:
                move(json.loads(store.stdout.readline())["address"], wanted)
            finally:
                store.kill()
        plan = [*command, "plan", "--shape", "8x4", "--dtype", "bf16", "--src", "2:S0", "--dst", "2@2-3:S1"]
        subprocess.run(plan, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
        doctor = subprocess.run([*command, "doctor", "--json"], check=True, timeout=LIMIT, stdout=subprocess.PIPE)
        assert json.loads(doctor.stdout), doctor
    print(f"moved between two processes; {'trained by two; ' if wanted else ''}the doctor answers")


if __name__ == "__main__":
    actions = {"trainer": trainer, "inference": inference, "rank": rank}
    actions.get(sys.argv[1], lambda *rest: main(sys.argv[1], *rest))(*sys.argv[2:])
