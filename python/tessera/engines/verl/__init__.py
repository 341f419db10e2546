"""verl streams its weights from the actor to the rollout by the tensor bus.

In verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine.backend=tessera
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tessera.engines.verl.engine

verl gathers each tensor on the actor's first rank, and hands what arrives to its rollout's own loader: this is the way
between the two. Stream, which does the work, needs no verl.
"""

from __future__ import annotations

from ._stream import Stream

__all__ = ["Stream"]
