"""The model that training benchmarks train: Llama's blocks, in fp32."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotated(q, rotation), rotated(k, rotation)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before, self.between = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.before(x), rotation)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, options: argparse.Namespace, checkpoints: bool = False) -> None:
        """checkpoints: Blocks compute their activations again in the backward."""
        super().__init__()
        self.checkpoints = checkpoints
        width, heads = options.width, options.heads
        self.embedding = torch.nn.Embedding(options.words, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, options.hidden) for _ in range(options.layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = torch.nn.Linear(width, options.words, bias=False)
        size = width // heads // 2
        angles = torch.outer(torch.arange(options.tokens), 10_000.0 ** (-torch.arange(size) / size))
        self.rotation = angles.cos(), angles.sin()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = (
                checkpoint(block, x, self.rotation, use_reentrant=False)
                if self.checkpoints
                else block(x, self.rotation)
            )
        return self.head(self.norm(x))


def built(options: argparse.Namespace, checkpoints: bool = False) -> Llama:
    torch.manual_seed(1)
    return Llama(options, checkpoints)
