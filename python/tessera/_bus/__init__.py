"""Batches: what of the tensors here has which name on the bus, and its transfers."""
