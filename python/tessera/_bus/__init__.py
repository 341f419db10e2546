"""Batches: the names of tensors on the bus, and their transfers."""
