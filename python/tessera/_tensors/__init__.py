"""Tensors of torch, NumPy and others: their memory and their layouts."""
