"""accelerate's prepare(), accumulate(), clip_grad_norm_() and states with a sharded model, against one process."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
import trainers
from launched import launch
from tessera import etp

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, BOUND = 6, 1e-6


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)


class Loop:
    """The training loop of accelerate's documentation."""

    def __init__(self, micro: int = 1, clip: float = 0.5, precision: str = "no", prepared_later: bool = False) -> None:
        accelerate.state.AcceleratorState._reset_state(True)  # an earlier loop's of this process
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=micro,
            mixed_precision=precision,
            dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True),  # a scheduler counts steps, then
        )
        self.clip = clip
        model = trainers.sharded(trainers.gpt2())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(trainers.Samples(96), trainers.BATCH // micro)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if prepared_later:  # one by one
            self.model = self.accelerator.prepare(model)
            self.optimizer = self.accelerator.prepare(optimizer)
            self.loader, self.scheduler = self.accelerator.prepare(loader, scheduler)
        else:
            self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
                model, optimizer, loader, scheduler
            )

    def train(self, first: int, last: int, micro: int) -> list[float]:
        """Return the losses of these steps, of all ranks."""
        losses, total = [], torch.zeros(())
        for number, batch in enumerate(self.loader):
            if not first * micro <= number < last * micro:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            total = total + self.accelerator.reduce(loss.detach(), "mean") / micro
            if self.accelerator.sync_gradients:
                losses.append(total.item())
                total = torch.zeros(())
        return losses


LOOPS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "accumulated": {"micro": 2},
    "one by one": {"prepared_later": True},
    "bf16": {"precision": "bf16"},
}


def _losses(rank: int) -> dict[str, list[float]]:
    return {name: Loop(**options).train(0, STEPS, options.get("micro", 1)) for name, options in LOOPS.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_one_process(ranks):
    (expected,) = launch(_losses, 1)
    for losses in launch(_losses, ranks):
        assert len(losses["accumulated"]) == STEPS
        for name in LOOPS:
            bound = 1e-2 if name == "bf16" else BOUND  # products of fewer rows are rounded in another way
            assert losses[name] == pytest.approx(expected[name], rel=0, abs=bound), name


def _part(rank: int, load: str | None, save: str | None, first: int, last: int) -> Any:
    loop = Loop()
    if load is not None:
        loop.accelerator.load_state(load)
    losses = loop.train(first, last, 1)
    if save is not None:
        loop.accelerator.save_state(save)
        loop.accelerator.wait_for_everyone()  # rank 0 reads what others have, as long as their processes live
    model = loop.accelerator.unwrap_model(loop.model)
    return losses, {name: etp.whole(each).detach().clone() for name, each in model.named_parameters()}


def test_a_state_is_loaded_on_another_number_of_ranks(folder):
    ((expected, weights),) = launch(_part, 1, None, None, 0, STEPS)
    found = launch(_part, 2, None, str(folder / "2"), 0, 2)[0][0]
    found += launch(_part, 1, str(folder / "2"), str(folder / "1"), 2, 4)[0][0]
    for losses, trained in launch(_part, 3, str(folder / "1"), None, 4, STEPS):
        torch.testing.assert_close(found + losses, expected, rtol=0, atol=BOUND)
        torch.testing.assert_close(trained, weights, rtol=0, atol=1e-4)
    saved = safetensors.torch.load_file(folder / "2/model.safetensors")
    plain = safetensors.torch.load_file(folder / "1/model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in plain.items()
    }
    assert torch.load(folder / "2/optimizer.bin", weights_only=True).keys() == {"state", "param_groups"}


def _saved(rank: int, folder: str) -> Any:
    loop = Loop()
    loop.train(0, 2, 1)
    accelerator, model = loop.accelerator, loop.accelerator.unwrap_model(loop.model)
    accelerator.save_model(loop.model, f"{folder}/saved")
    model.save_pretrained(
        f"{folder}/pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:  # one rank alone
        accelerator.save(accelerator.get_state_dict(loop.model), f"{folder}/alone.bin")
    accelerator.wait_for_everyone()
    return type(model).__name__, {name: etp.whole(each).detach().clone() for name, each in model.named_parameters()}


def test_models_are_saved_as_plain_files(folder):
    from transformers import AutoModelForCausalLM

    (name, weights), _ = launch(_saved, 2, str(folder))
    assert name == "GPT2LMHeadModel"
    plain = trainers.gpt2()
    files = [
        AutoModelForCausalLM.from_pretrained(folder / "pretrained").state_dict(),
        safetensors.torch.load_file(folder / "saved/model.safetensors"),
        torch.load(folder / "alone.bin", weights_only=True),
    ]
    for state in files:
        plain.load_state_dict(state, strict=False)
        for key, tensor in plain.named_parameters():
            assert torch.equal(tensor, weights[key]), key
