"""What transformers answers with the weights of a version, and how far a server's answer agrees."""

import pathlib
from typing import NamedTuple

import torch
from model import TIE, encode, untrained
from safetensors.torch import load_file


class Compared(NamedTuple):
    equal: int  # tokens, from the first one
    counted: int  # tokens before the first step at which two are equally likely

    @property
    def well(self) -> bool:
        return self.equal >= self.counted


def agreement(weights: pathlib.Path, answers: dict[str, list[int]]) -> dict[str, Compared]:
    """By prompt. Both compute in bf16, in another order, so which of two tokens that are equally likely comes first is
    left to chance, and what follows it, too."""
    model = untrained()
    model.load_state_dict(load_file(weights))
    model.to(torch.bfloat16).eval()
    found = {}
    for prompt, given in answers.items():
        tokens = encode(prompt)[None]
        made = model.generate(
            tokens,
            max_new_tokens=len(given),
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = made.sequences[0, tokens.shape[1] :].tolist()
        found[prompt] = Compared(_alike(given, expected), _certain(made.logits))
    return found


def _alike(one: list[int], other: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _certain(logits: tuple[torch.Tensor, ...]) -> int:
    for k, each in enumerate(logits):
        first, second = each[0].float().topk(2).values.tolist()
        if first - second < TIE * abs(first):
            return k
    return len(logits)
