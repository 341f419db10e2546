"""Any module: what stays in memory between forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tessera import etp
from torch.utils.checkpoint import checkpoint
from torch_ranks import launch

LAYERS, ROWS, COLUMNS = 6, 512, 512
FULL = ROWS * COLUMNS * 4


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(ROWS, COLUMNS) / 32 for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, recompute: bool) -> torch.Tensor:
        for i, weight in enumerate(self.weights):
            if recompute:
                x = checkpoint(lambda x, i=i: (x @ self.weights[i].t()).tanh(), x, use_reentrant=False)
            else:
                x = F.linear(x, weight).tanh()
        return x


def _gathered_bytes(rank: int) -> list[tuple[int, int]]:
    with etp.init_group() as group:
        model = etp.shard_module_(Deep(), group)
        found = []
        for recompute in (False, True):
            out = model(torch.ones(2, COLUMNS), recompute)
            held = etp.report(model).gathered_bytes
            kept: list[int] = []

            def note(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
                if not isinstance(tensor, etp.LogicalTensor):  # which has rows, and is no copy of the whole
                    kept.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                model(torch.ones(2, COLUMNS), recompute)
            found.append((held, sum(kept)))
            out.sum().backward()
        return found


def test_no_gathered_weight_stays_between_forward_and_backward() -> None:
    for plain, recomputed in launch(_gathered_bytes, 2):
        assert plain[0] <= 3 * FULL and recomputed[0] <= 3 * FULL
        # Hooks of a user see activations, and no gathered weight; a checkpoint's block saves its input only.
        assert plain[1] == 2 * LAYERS * 2 * COLUMNS
        assert recomputed[1] <= LAYERS * 2 * COLUMNS
