"""A small model of transformers, its samples, and a Trainer for them: in one process, or sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from tessera import etp

BATCH = 12  # of a step, over all ranks
WORDS = 53  # so that losses are below 4, where floats are 2.4e-7 apart
LENGTH = 16


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Other tokens for each number."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + number)
        tokens = torch.randint(
            WORDS // 4, (LENGTH,), generator=generator
        )  # some of the words: there is something to learn
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """A tied head, Conv1D, biases."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=32,
        vocab_size=WORDS,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def sharded(model: Any, **options: Any) -> Any:
    """Return the model, sharded where there are several ranks."""
    return etp.shard_module_(model, etp.init_group(), **options) if world() > 1 else model


def trainer_of(model: Any, folder: str, micro: int = 1, cls: Any = None, **options: Any) -> Any:
    """Return a Trainer whose steps have `BATCH` samples in `micro` micro-batches, over all ranks."""
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # an earlier Trainer's of this process
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // world() // micro,
        "per_device_eval_batch_size": BATCH // world(),
        "gradient_accumulation_steps": micro,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }
    arguments = transformers.TrainingArguments(folder, **(chosen | options))
    made = cls or transformers.Trainer
    return made(model=model, args=arguments, train_dataset=Samples(96), eval_dataset=Samples(24, 1000))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
