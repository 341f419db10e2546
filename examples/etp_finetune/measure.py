"""What a rank of a training holds, and the weights that it ends with. The model may be sharded or not."""

import json
import pathlib
import re
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tessera import etp

INTERVAL = 0.05  # seconds


class Peak:
    """The most memory that this process takes from now on, code and files left out. What several processes map is
    divided among them, as the kernel does for Pss (proc(5)), which it counts on request only: a thread asks again and
    again."""

    def __init__(self) -> None:
        self._before = self._most = _memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._most = max(self._most, _memory())

    def end(self) -> int:
        """In bytes, more than at first."""
        self._ended.set()
        self._thread.join()
        return self._most - self._before


def _memory() -> int:
    found = re.findall(r"^Pss_(?:Anon|Shmem): *(\d+) kB$", pathlib.Path("/proc/self/smaps_rollup").read_text(), re.M)
    return sum(map(int, found)) * 1024


def size(tensors: Iterable[torch.Tensor]) -> int:
    """In bytes, of this rank's rows."""
    return sum(etp.local(tensor).nbytes for tensor in tensors)


def write(folder: pathlib.Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, peak: int) -> None:
    """Writes memory-RANK.json and, on rank 0, weights.safetensors with whole weights. Collective."""
    rank = dist.get_rank()
    parameters = list(model.parameters())
    memory = {
        "parameters": size(parameters),
        "gradients": size(each.grad for each in parameters if each.grad is not None),
        "optimiser": size(value for state in optimizer.state.values() for value in state.values()),
        "peak": peak,
    }
    (folder / f"memory-{rank}.json").write_text(json.dumps(memory))
    with etp.summon(model):
        if rank == 0:
            save_file({name: each.detach() for name, each in model.named_parameters()}, folder / "weights.safetensors")
