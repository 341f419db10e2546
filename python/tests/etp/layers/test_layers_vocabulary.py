"""Embeddings and heads whose vocabulary is cut over a tp_group: close to plain torch, and the same bytes for every ETP
size."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, built
from tessera import etp
from torch_ranks import launch

TP, SEQUENCE, BATCH, PADDING = 2, 6, 3, 150
CASES = list(itertools.product((WORDS, WORDS + 1), (False, True), (False, True)))  # words, tied, sequence
Case = tuple[int, bool, bool]
Weights = dict[str, torch.Tensor]


def _init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.2)


class Plain(torch.nn.Module):
    def __init__(self, words: int, tied: bool) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(words, WIDTH, PADDING, device="meta").to_empty(device="cpu")
        _init(self.emb.weight)
        self.emb.weight.data[PADDING] = 0
        self.mlp = etp.LayerNormMLP(WIDTH, HIDDEN, init_method=_init, output_layer_init_method=_init)
        self.head = torch.nn.Linear(WIDTH, words, device="meta").to_empty(device="cpu")
        _init(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.head(x + self.mlp(x))


class Parallel(Plain):
    def __init__(self, words: int, tied: bool, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.emb = etp.Embedding(words, WIDTH, PADDING, parallel_mode="vocab", init_method=_init, **options)
        inits = {"init_method": _init, "output_layer_init_method": _init}
        self.mlp = etp.LayerNormMLP(WIDTH, HIDDEN, set_parallel_mode=True, **inits, **options)
        self.head = etp.Linear(WIDTH, words, parallel_mode="column", init_method=_init, **options)
        if tied:
            self.head.weight = self.emb.weight


def _trained(run: Run, case: Case, tp_group: Any) -> Weights:
    """Ranks of a tp_group see the same tokens, or their part of the sequence."""
    words, tied, sequence = case

    def loss(model: Any, number: int) -> torch.Tensor:
        ids = torch.randint(0, words, (2, SEQUENCE, BATCH), generator=torch.Generator().manual_seed(number))
        ids[0, 0, 0] = PADDING
        ids[1, 0, 0] = -100
        logits = model(ids[0])
        if tp_group is None:
            return F.cross_entropy(logits.flatten(0, 1), ids[1].flatten())
        losses = etp.vocab_parallel_cross_entropy(logits, ids[1], model.emb.vocab_range, tp_group)
        return losses.sum() / (losses.numel() - 1)

    options = {"tp_group": tp_group, "sequence_parallel": sequence, "etp_group": run.group}
    model = built(lambda: Plain(words, tied) if tp_group is None else Parallel(words, tied, **options))
    run.train(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=loss)
    assert (model.head.weight is model.emb.weight) == tied
    return {name: run.whole(each).detach().clone() for name, each in model.named_parameters()}


def _on_rank(rank: int, etp_size: int) -> list[Weights]:
    """Tensor parallelism over neighbours, ETP across."""
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(etp_size)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)] if etp_size > 1 else []
    if not etp_groups:
        return [_trained(Run(2), case, tp_groups[0]) for case in CASES]
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        return [_trained(Run(2, rank // TP, group), case, tp_groups[rank // TP]) for case in CASES]


@pytest.fixture(scope="module")
def trained() -> dict[int, list[list[Weights]]]:
    return {size: launch(functools.partial(_on_rank, etp_size=size), TP * size) for size in (1, 2)}


def _part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """By the rules of Megatron; of 203 words rank 0 has 102."""
    if name.startswith(("emb.", "head.")):
        return whole.tensor_split(TP)[rank]
    if name == "mlp.fc2_weight":
        return whole.chunk(TP, 1)[rank]
    return whole.chunk(TP)[rank] if name.startswith("mlp.fc1") else whole


@pytest.mark.parametrize("case", CASES)
def test_it_is_close_to_plain_torch(trained: dict[int, list[list[Weights]]], case: Case) -> None:
    torch.set_num_threads(1)
    words, tied, _ = case
    expected = _trained(Run(2), case, None)
    before = dict(built(lambda: Plain(words, tied)).named_parameters())
    for rank, found in enumerate(trained[1]):
        assert found[CASES.index(case)].keys() == expected.keys()
        for name, value in found[CASES.index(case)].items():
            part = _part(name, expected[name], rank)
            torch.testing.assert_close(value, part, rtol=1e-4, atol=1e-6)
            moved = (part - _part(name, before[name], rank)).abs().max()
            assert moved > 1e-4, name  # a gradient that is missing, or twice there, would show
    if not tied:
        begin = words - words // TP
        assert not trained[1][1][CASES.index(case)]["emb.weight"][PADDING - begin].any()


def test_every_etp_size_gives_the_same_bytes(trained: dict[int, list[list[Weights]]]) -> None:
    for rank, found in enumerate(trained[2]):
        for mine, other in zip(found, trained[1][rank % TP], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def _refused(rank: int) -> list[str]:
    group = torch.distributed.group.WORLD
    found = []

    def embedding(words: int = 5, **options: Any) -> Any:
        return etp.Embedding(words, 8, parallel_mode="vocab", tp_group=group, **options)

    def tied(parallel_mode: str | None) -> None:
        head = etp.Linear(8, 5, bias=False, parallel_mode=parallel_mode, tp_group=group, name="head")
        head.weight = embedding().weight

    tied("column")
    own = embedding().vocab_range
    words = own[1] - own[0]
    with etp.init_group(timeout=30) as along:
        for act in (
            lambda: embedding()(torch.tensor([2, 5])),
            lambda: etp.vocab_parallel_cross_entropy(torch.ones(1, words), torch.tensor([5]), own, group),
            lambda: etp.vocab_parallel_cross_entropy(torch.ones(1, 5), torch.tensor([4]), own, group),
            lambda: embedding(1),
            lambda: tied(None),
            lambda: embedding(etp_group=along, name="emb"),
        ):
            with pytest.raises((tessera.InvalidArgumentError, tessera.MismatchError)) as refused:
                act()
            found.append(str(refused.value))
    return found


def test_what_a_vocabulary_may_not_be() -> None:
    for rank, (outside, target, logits, too_small, shape, along) in enumerate(launch(_refused, TP)):
        assert "indices from 2 to 5 of 5 rows" in outside
        assert "target 5 is no word of any rank" in target
        assert f"logits are (1, 5): (1, {3 - rank}) are needed" in logits
        assert "1 of (1, 8) cannot be cut over 2 ranks of the tp_group" in too_small
        assert f"head.weight is (5, 8), and what is put in its place {(3 - rank, 8)}" in shape
        assert "emb: ranks" in along and "has to be orthogonal to the ETP group" in along


def test_the_loss_of_one_rank_is_that_of_torch() -> None:
    logits, targets = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=2).view(3, 4)
    found = etp.vocab_parallel_cross_entropy(logits, targets, (0, 5), None, ignore_index=2)
    torch.testing.assert_close(found, expected)
