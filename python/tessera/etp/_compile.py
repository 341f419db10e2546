"""torch.compile leaves this package out of its graphs: a use of a sharded weight is a break between two of them."""

from __future__ import annotations

_told: list[bool] = []


def leave_out_of_graphs() -> None:
    """Once a process. It imports the compiler, as torch's optimisers do."""
    if not _told:
        from torch._dynamo import trace_rules

        trace_rules.add("tessera.etp")
        _told.append(True)
