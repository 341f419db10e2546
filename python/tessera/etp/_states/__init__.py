"""States of models and optimisers as logical tensors."""
