"""The model of both jobs: a small Qwen with tied embeddings, whose tokens are bytes, and the text that it learns."""

import codecs
import contextlib
import io
import math

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

WINDOW = 128  # bytes in one training window
PROMPT = "Beautiful "

transformers.utils.logging.set_verbosity_error()


def untrained() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4 * WINDOW,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def text() -> torch.Tensor:
    """The Zen of Python, which comes with every Python."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
        import this
    return torch.tensor(list(codecs.decode(this.s, "rot13").encode()))


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM) -> float:
    """Of the text: 8 is guessing, 0 is knowing it by heart."""
    whole = text()
    windows = whole[: len(whole) // WINDOW * WINDOW].view(-1, WINDOW)
    return model(input_ids=windows, labels=windows).loss.item() / math.log(2)


@torch.no_grad()
def generate(model: Qwen3ForCausalLM, length: int = 90) -> str:
    """The prompt, continued with the most likely bytes."""
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = model.generate(prompt, max_new_tokens=length, do_sample=False, pad_token_id=0)
    return bytes(tokens[0].tolist()).decode(errors="replace")
