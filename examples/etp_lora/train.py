"""LoRA adapters with PEFT on a model whose weights are sharded; without torchrun, the same training in one process.

torchrun --nproc-per-node 2 examples/etp_lora/train.py FOLDER
"""

import os
import pathlib
import sys

import peft
import torch
import transformers
from tessera import etp

TEXT = b"She sells sea shells by the sea shore. The shells she sells are sea shells, I am sure. " * 8
STEPS, MICRO_BATCHES, LENGTH = 40, 6, 64  # of a step, over all ranks
rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
torch.set_num_threads(1)
if MICRO_BATCHES % world:
    sys.exit(f"{MICRO_BATCHES} micro-batches are not divided by {world} ranks, which make as many backward passes each")


def say(text: str) -> None:
    if rank == 0:
        print(text)


def make_base() -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks; a real program loads them
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def batch(number: int) -> torch.Tensor:
    first = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(number)).tolist()
    return torch.tensor([list(TEXT[begin : begin + LENGTH]) for begin in first])


folder = pathlib.Path(sys.argv[1])
base = make_base()
if world > 1:
    torch.distributed.init_process_group("gloo")
    etp.shard_module_(base, etp.init_group())
torch.manual_seed(1)  # the same adapters on all ranks
config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
model = peft.get_peft_model(base, config)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)

for step in range(STEPS):
    total = torch.zeros(())
    for number in range(rank, MICRO_BATCHES, world):
        ids = batch(step * MICRO_BATCHES + number)
        loss = model(input_ids=ids, labels=ids).loss
        (loss * world / MICRO_BATCHES).backward()  # gradients are averaged over the ranks
        total += loss.detach() / MICRO_BATCHES
    optimizer.step()
    optimizer.zero_grad()
    if step % 13 == 0:
        if world > 1:
            torch.distributed.all_reduce(total)
        say(f"step {step:2}  loss {total:.4f}")

mine = sum(etp.local(each).nbytes for each in model.parameters())
say(f"rank 0 keeps {mine:,} of {sum(each.nbytes for each in model.parameters()):,} bytes of weights and adapters")

ids = batch(-1)
model.eval()
if rank == 0:  # alone
    model.save_pretrained(folder / "adapter")
model.merge_adapter()  # on all ranks: it writes the weights
with torch.no_grad():
    merged = model(input_ids=ids).logits
model.unmerge_adapter()

if rank == 0:
    plain = peft.PeftModel.from_pretrained(make_base(), folder / "adapter").eval()
    with torch.no_grad():
        difference = (plain(input_ids=ids).logits - merged).abs().max()
    files = ", ".join(
        f"{each.name} ({each.stat().st_size:,} bytes)" for each in (folder / "adapter").glob("*.safetensors")
    )
    say(f"plain PEFT loads {files}; its logits differ from those of the merged weights by at most {difference:.0e}")
if world > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
