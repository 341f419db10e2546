"""Tensors of torch, NumPy and others: where they lie, and what layouts they have."""
