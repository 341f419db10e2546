"""The model of both jobs: a small Qwen3 whose tokens are bytes, and the text that it learns."""

import pathlib
import sys

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "weight_sync"))
from text import pairs

WINDOW = 96  # bytes in one training window
LENGTH = 24  # bytes of an answer
TIE = 0.03  # two tokens whose logits differ by less, as a share of the larger one, are equally likely in bf16
PROMPTS = ("The ", "If ", "An object ", "A class ", "When a ", "This is ", "The value of ", "It is an error ")

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def untrained(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(dtype)


def save_untrained(folder: pathlib.Path) -> None:
    """What `vllm serve` starts with."""
    untrained(torch.bfloat16).save_pretrained(folder)


def text() -> torch.Tensor:
    """Sentences of Python's own documentation, one a line."""
    return encode("\n".join(sentence for pair in pairs() for sentence in pair))


def encode(characters: str) -> torch.Tensor:
    return torch.tensor(list(characters.encode("ascii", "ignore")))


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("ascii", "replace")
