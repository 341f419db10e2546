"""A training by Hugging Face's Trainer, as a user writes it; several processes shard the model, by one more line.

torchrun --standalone --nproc-per-node 2 train.py OUTPUT [CHECKPOINT]
"""

import codecs
import contextlib
import io
import json
import os
import pathlib
import sys

import torch
import transformers
from tessera import etp

with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
    import this

TEXT = codecs.decode(this.s, "rot13").encode()
WINDOW = 64
SAMPLES = 12  # of a step, over all processes


class Windows(torch.utils.data.Dataset):
    """Windows of the Zen of Python, whose tokens are bytes. Those of an evaluation are two full batches: Trainer weighs
    a last batch that is not full in another way on each number of processes."""

    def __init__(self, first, step):
        self.begins = range(first, len(TEXT) - WINDOW, step)

    def __len__(self):
        return len(self.begins)

    def __getitem__(self, number):
        begin = self.begins[number]
        tokens = torch.tensor(list(TEXT[begin : begin + WINDOW]))
        return {"input_ids": tokens, "labels": tokens}


def main():
    output, checkpoint = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    arguments = transformers.TrainingArguments(
        output,
        per_device_train_batch_size=SAMPLES // ranks,
        per_device_eval_batch_size=SAMPLES // ranks,
        max_steps=24,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        gradient_checkpointing=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    if ranks > 1:
        etp.shard_module_(model, etp.init_group())
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Windows(0, 1), eval_dataset=Windows(3, 33)
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        summary = {
            "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
            "evaluated": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
            "best": trainer.state.best_global_step,
        }
        pathlib.Path(output, "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
