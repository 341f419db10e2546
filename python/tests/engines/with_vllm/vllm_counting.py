"""The workers' extension, which also tells what this rank receives and how much memory it takes."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from tessera.engines.vllm.worker import Extension


class Counting(Extension):
    def tessera_counts(self) -> dict[str, Any]:
        live = self.weight_transfer_engine._live
        told = pathlib.Path("/proc/self/smaps_rollup").read_text()
        counts: dict[str, Any] = {"pid": os.getpid()}
        for name in ("Rss", "Pss"):
            found = re.search(rf"^{name}:\s+(\d+) kB", told, re.MULTILINE)
            counts[name] = int(found[1]) * 1024 if found else 0
        if live is not None:
            counts["received"] = live._batch.stats.rank_bytes  # type: ignore[attr-defined]  # in one transfer
            counts["share"] = live._learned.nbytes
        return counts
