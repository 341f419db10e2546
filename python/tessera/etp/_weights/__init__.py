"""Sharded weights: the parameter that a user sees, what it is a part of, and its gradients."""
