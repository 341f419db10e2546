"""The recipes of docs/guide/etp.md, as they stand there."""

from __future__ import annotations

import pathlib
import re
import tempfile
from typing import Any

import pytest
import torch
import trainers
from launched import launch
from tessera import etp

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

PAGE = pathlib.Path(__file__).resolve().parents[4] / "docs/guide/etp.md"


def recipe(title: str) -> dict[str, Any]:
    """Return what the program below a heading defines."""
    below = PAGE.read_text().split(f"### {title}\n", 1)[1]
    (block,) = re.findall(
        r"^```py\n(.*?)^```", below.split("\n## ", 1)[0].split("\n### ", 1)[0], re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"torch": torch, "etp": etp}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def _trainer(rank: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(folder, logging_steps=1, **options)
        trained = recipe("Hugging Face Trainer")["trained"](trainers.llama(), arguments, trainers.Samples(96))
        return trainers.losses_of(trained), type(trained.model.lm_head.weight).__name__


def test_trainer():
    first, second = launch(_trainer, 2)
    assert first == second
    assert len(first[0]) == 2
    assert first[1] == "LogicalParameter"


def _accelerate(rank: int, folder: str) -> Any:
    train = recipe("accelerate")["train"]
    accelerator = accelerate.Accelerator(cpu=True, project_dir=folder)
    loader = torch.utils.data.DataLoader(trainers.Samples(24), 6)
    model = trainers.gpt2()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(accelerator, model, loader, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    return {name: etp.whole(each).detach().clone() for name, each in model.named_parameters()}


def test_accelerate(tmp_path):
    import safetensors.torch

    first, second = launch(_accelerate, 2, str(tmp_path))
    saved = safetensors.torch.load_file(tmp_path / "checkpoint/model.safetensors")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert torch.equal(tensor, saved[name])
