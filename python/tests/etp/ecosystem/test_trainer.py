"""Hugging Face's Trainer with a sharded model, against one process that has all batches."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from launched import launch
from tessera import etp

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS = 6
BATCH = 12  # of a step, over all ranks
WORDS = 257


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Other tokens for each number."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + number)
        tokens = torch.randint(WORDS, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def _trained(rank: int, folder: str, world: int) -> list[float]:
    model = llama()
    if world > 1:
        etp.shard_module_(model, etp.init_group())
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH // world,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(96))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_are_those_of_one_process():
    with tempfile.TemporaryDirectory() as folder:
        (expected,) = launch(_trained, 1, folder, 1)
        for losses in launch(_trained, 2, folder, 2):
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6)
