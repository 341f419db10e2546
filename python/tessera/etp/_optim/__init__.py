"""Optimisers' steps, and norms of gradients that lie on several ranks."""
