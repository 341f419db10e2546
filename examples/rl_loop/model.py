"""The model of both jobs: a small transformer whose tokens are the characters of ASCII.

Neither etp.shard_module_() nor parallelize_module() renames parameters, so the names match.
"""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 128
WIDTH = 128
HEADS = 4
BLOCKS = 2
TURN = 1e4  # tokens for a radian of the slowest rotary angle
# The weights that travel quantised: between the trainer's ranks, and with --wire to the other job, too. Norms have one
# dim, so they are not quantised.
MATRICES = r"blocks\..*\.weight"

Past = list[torch.Tensor]  # keys and values of a block, for the tokens that it has seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        x = x + self.out(self._attend(self.attention_norm(x), past))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        """Over the heads that this rank has: all of them, unless query, key and value are cut by rows."""
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        first = past[0].shape[2] if past else 0
        query, key = _rotated(query, first), _rotated(key, first)
        if past is not None:
            if past:
                key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            past[:] = [key, value]
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        return found.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, past: list[Past] | None = None) -> torch.Tensor:
        """Logits of what follows each token. With `past`, a list for each block and empty at first, one token is given
        at a time."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, None if past is None else past[number])
        return self.head(self.norm(x))


def _rotated(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions, from `first` on."""
    half = x.shape[-1] // 2
    speeds = TURN ** -(torch.arange(half) / half)
    angles = torch.arange(first, first + x.shape[2])[:, None] * speeds
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def untrained() -> Model:
    """Random weights, the same on every call."""
    torch.manual_seed(0)
    return Model()
