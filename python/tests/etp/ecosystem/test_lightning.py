"""Lightning's Trainer with sharded weights, by the strategy and by plain means, against one process."""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
from launched import launch
from tessera import etp

pytest.importorskip("lightning")

BATCH = 12  # of a step, over all ranks
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
}


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(number))
        return x, x.sum().sin().reshape(1)


class Batches(torch.utils.data.Sampler[list[int]]):
    """Each rank's part of batches that are the same for any number of ranks."""

    def __init__(self, count: int, rank: int, world: int) -> None:
        self.count, self.rank, self.size = count, rank, BATCH // world

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.rank * self.size, self.count, BATCH):
            yield list(range(first, first + self.size))

    def __len__(self) -> int:
        return self.count // BATCH


def make_module(shards_itself: bool = False, bias: bool = True, seed: int = 0) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(32, 128, bias=bias),
                torch.nn.GELU(),
                torch.nn.Linear(128, 64, bias=bias),
                torch.nn.Tanh(),
                torch.nn.Linear(64, 1 if bias else 32, bias=bias),
            )

        def configure_model(self) -> None:
            if shards_itself and not any(isinstance(each, etp.LogicalTensor) for each in self.parameters()):
                etp.shard_module_(self, etp.init_group())

        def loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]).mean(1, keepdim=True), batch[1])

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    return Module()


def make_trainer(folder: pathlib.Path, world: int, strategy: Any, epochs: int, **options: Any) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # torchrun has started the ranks
    return lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if world == 1 else strategy,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="loss")],
        **options,
    )


def loaders(rank: int, world: int) -> list[Any]:
    return [
        torch.utils.data.DataLoader(Samples(count), batch_sampler=Batches(count, rank, world)) for count in (48, 24)
    ]


def whole_weights(module: Any) -> list[torch.Tensor]:
    return [etp.whole(each).clone() for each in module.state_dict().values()]


def strategy_of(name: str) -> Any:
    """Import what "etp" needs, as a program does."""
    from tessera.etp.lightning import ETPStrategy

    return ETPStrategy(shard={"min_elements": 1024}) if name == "options" else name


def trained(rank: int, world: int, strategy: str, folder: str) -> dict[str, Any]:
    """Fit with each of the options, validate, and fit for another epoch with a new optimiser."""
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        module = make_module(shards_itself=world > 1 and strategy == "ddp")
        trainer = make_trainer(pathlib.Path(folder) / name, world, strategy_of(strategy), 2, **options)
        trainer.fit(module, *loaders(rank, world))
        assert world == 1 or sum(isinstance(each, etp.LogicalTensor) for each in module.parameters()) == 2
        (validated,) = trainer.validate(module, loaders(rank, world)[1], verbose=False)
        found[name] = whole_weights(module), validated["loss"]
        if name == "plain":
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, *loaders(rank, world))
            found["further"] = whole_weights(module), trainer.callback_metrics["loss"].item()
    if world == 1:
        module = make_module()
        trainer = make_trainer(pathlib.Path(folder) / "uninterrupted", world, strategy, 3)
        trainer.fit(module, *loaders(rank, world))
        found["uninterrupted"] = whole_weights(module), trainer.callback_metrics["loss"].item()
    if strategy != "ddp":  # DistributedDataParallel has nothing to do
        module = make_module(bias=False, seed=rank)  # all ranks take rank 0's weights
        trainer = make_trainer(pathlib.Path(folder) / "no biases", world, strategy_of(strategy), 1)
        trainer.fit(module, *loaders(rank, world))
        found["no biases"] = whole_weights(module), trainer.callback_metrics["loss"].item()
    return found


def resumed(rank: int, world: int, strategy: str, folder: str) -> dict[str, Any]:
    """Go on from the checkpoint of the second epoch."""
    module = make_module(shards_itself=world > 1 and strategy == "ddp")
    with tempfile.TemporaryDirectory() as own:
        trainer = make_trainer(pathlib.Path(own), world, strategy_of(strategy), 3)
        checkpoint = str(pathlib.Path(folder) / "plain" / "epoch=1.ckpt")
        trainer.fit(module, *loaders(rank, world), ckpt_path=checkpoint)
    return {"uninterrupted": (whole_weights(module), trainer.callback_metrics["loss"].item())}


def in_bf16(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Fit without sharding by DistributedDataParallel: products over fewer samples are rounded to bf16 otherwise."""
    module = make_module()
    trainer = make_trainer(pathlib.Path(folder), world, "ddp", 2, **OPTIONS["bf16"])
    trainer.fit(module, *loaders(rank, world))
    return {"bf16": (whole_weights(module), trainer.callback_metrics["loss"].item())}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (weights, loss) in found.items():
        atol = 1e-3 if name == "bf16" else 1e-4  # AdamW enlarges what is rounded of small gradients
        assert abs(loss - expected[name][1]) < 1e-5, (name, loss, expected[name][1])
        for own, other in zip(weights, expected[name][0], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the outcome of one process without sharding, with its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        (expected,) = launch(trained, 1, 1, "etp", folder)
        yield folder, expected


@pytest.mark.parametrize("strategy", ["etp", "options", "ddp"])
def test_a_training_is_that_of_one_process(alone: tuple[str, dict[str, Any]], strategy: str) -> None:
    folder, expected = alone
    with tempfile.TemporaryDirectory() as two, tempfile.TemporaryDirectory() as three:
        for world, own in ((2, two), (3, three)):
            with tempfile.TemporaryDirectory() as other:
                bf16 = launch(in_bf16, world, world, other)[0]
            for found in launch(trained, world, world, strategy, own):
                compare(found, expected | bf16)
        saved = torch.load(pathlib.Path(two) / "plain" / "epoch=1.ckpt", weights_only=True)
        assert {type(each) for each in saved["state_dict"].values()} == {torch.Tensor}
        for world, source in ((3, two), (1, three), (2, folder)):
            for found in launch(resumed, world, world, strategy, source):
                compare(found, expected)


def test_options_of_a_wrapper_are_refused() -> None:
    from tessera.etp.lightning import ETPStrategy

    with pytest.raises(tessera.InvalidArgumentError, match="find_unused_parameters.*there is no such option"):
        ETPStrategy(find_unused_parameters=True)
