"""PEFT's LoRA with sharded weights, against one process that has all batches: models of transformers from
configurations, sharded before get_peft_model() and after it."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launched import launch
from tessera import etp

pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLE = pathlib.Path(__file__).resolve().parents[4] / "examples" / "etp_lora"
WORDS = 128
STEPS = 20


def llama() -> Any:
    import transformers

    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=WORDS, tie_word_embeddings=False)
    )


def gpt2() -> Any:
    """Conv1D, and a tied head."""
    import transformers

    torch.manual_seed(3)
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1)
    )


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"r": 8},  # adapters stay whole on each rank
    "large": {"r": 64},  # and are cut
    "saved": {"r": 8, "modules_to_save": ["lm_head"]},
    "dora": {"r": 8, "use_dora": True},
    "olora": {"r": 8, "init_lora_weights": "olora"},  # changes the weights of the base
}


def adapted(base: Any, kind: str, options: str) -> Any:
    import peft

    torch.manual_seed(5)
    init = {"init_lora_weights": "gaussian", "fan_in_fan_out": kind == "gpt2"}
    return peft.get_peft_model(
        base, peft.LoraConfig(lora_alpha=16, target_modules=TARGETS[kind], **{**init, **OPTIONS[options]})
    )


class Pair:
    """A sharded model of a rank, and a plain one that has all batches."""

    def __init__(self, rank: int, world: int, kind: str, options: str, before: bool) -> None:
        self.rank, self.world, self.kind, self.options = rank, world, kind, options
        base = MODELS[kind]()
        if before:
            etp.shard_module_(base, etp.init_group(), reduction="sum")
        self.sharded = adapted(base, kind, options)
        if not before:
            etp.shard_module_(self.sharded, etp.init_group(), reduction="sum")
        self.plain = adapted(MODELS[kind](), kind, options)
        self.batch = 0

    @property
    def both(self) -> tuple[Any, Any]:
        return self.sharded, self.plain

    def loss(self, model: Any, number: int) -> torch.Tensor:
        ids = torch.randint(2, WORDS, (2, 10), generator=torch.Generator().manual_seed(number))
        value: torch.Tensor = model(input_ids=ids, labels=ids).loss / self.world
        return value

    def train(self, steps: int) -> None:
        optimizers = [
            torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
            for model in self.both
        ]
        for _ in range(steps):
            numbers = range(self.batch, self.batch + self.world)
            self.batch += self.world
            own = self.loss(self.sharded, numbers[self.rank])
            own.backward()
            losses = [self.loss(self.plain, number) for number in numbers]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(own, losses[self.rank], rtol=0, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.compare()

    def compare(self) -> None:
        """Weights have the same bits."""
        sharded, plain = (dict(model.named_parameters()) for model in self.both)
        assert sharded.keys() == plain.keys()
        assert any(isinstance(each, etp.LogicalTensor) for each in sharded.values())
        assert [name for name in plain if not torch.equal(etp.whole(sharded[name]), plain[name])] == []

    def compare_outputs(self) -> None:
        ids = torch.arange(2, 12).reshape(1, 10)
        with torch.no_grad():
            own, other = (model(input_ids=ids).logits for model in self.both)
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def life(rank: int, world: int, kind: str, options: str, before: bool, folder: str) -> list[str]:
    """Train an adapter, save it, merge and unmerge it, train a second one, load the first again, and merge."""
    import peft

    pair = Pair(rank, world, kind, options, before)
    pair.train(STEPS)

    adapter = pathlib.Path(folder) / "adapter"
    if rank == 0:  # alone
        pair.sharded.save_pretrained(adapter)
        loaded = peft.PeftModel.from_pretrained(MODELS[kind](), adapter, is_trainable=True)
        if options != "olora":  # which has changed the base
            weights = dict(loaded.named_parameters())
            for name, each in pair.plain.named_parameters():
                torch.testing.assert_close(weights[name], each, rtol=0, atol=0)
    torch.distributed.barrier()

    with pair.sharded.disable_adapter(), pair.plain.disable_adapter():
        pair.compare_outputs()
    for each in pair.both:
        each.merge_adapter()
    pair.compare()
    pair.compare_outputs()
    for each in pair.both:
        each.unmerge_adapter()
    pair.compare()

    for each in pair.both:
        torch.manual_seed(7)
        each.add_adapter("second", peft.LoraConfig(r=8, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2"))
        each.set_adapter("second")
    pair.train(3)
    for each in pair.both:
        each.load_adapter(str(adapter), "third")
        each.set_adapter("third")
    pair.compare()
    pair.compare_outputs()
    for each in pair.both:
        each.delete_adapter("third")
        each.set_adapter("default")
    pair.train(2)

    pair.sharded, pair.plain = (each.merge_and_unload() for each in pair.both)
    pair.compare()
    pair.compare_outputs()
    merged = pathlib.Path(folder) / "merged"
    if rank == 0:
        pair.sharded.save_pretrained(merged)
        whole = type(pair.plain).from_pretrained(merged)
        for own, other in zip(whole.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)
    torch.distributed.barrier()
    return sorted(os.listdir(adapter))


CASES = [
    (2, "llama", "small", True),
    (2, "llama", "large", False),
    (2, "llama", "dora", False),
    (2, "llama", "olora", False),
    (2, "gpt2", "large", True),
    (2, "gpt2", "saved", False),
    (3, "llama", "small", False),
    (3, "llama", "saved", True),
    (3, "gpt2", "small", False),
]


@pytest.mark.parametrize(("world", "kind", "options", "before"), CASES)
def test_an_adapter_is_that_of_one_process(world: int, kind: str, options: str, before: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for files in launch(life, world, world, kind, options, before, folder):
            assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_the_example_prints_what_its_page_says(tmp_path: pathlib.Path) -> None:
    program = str(EXAMPLE / "train.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for block, command in enumerate(([*launcher, program], [program])):
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path / str(block))], stdout=subprocess.PIPE, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout
        *expected, last = re.findall(r"```\n(step.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)[
            block
        ].splitlines()
        assert [line for line in expected if line not in done.stdout.splitlines()] == []
        assert last.rpartition(" ")[0] in done.stdout  # without the difference, which is rounding
