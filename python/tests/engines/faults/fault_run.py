"""Many faults, in engines of 1, 2 and 4 ranks: `python fault_run.py [--faults 900] [--seed 0]`, in this folder. With
--vllm, in an environment that has vLLM for CPU and pytest: of a model of vLLM, on 1 and 2 ranks."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator

if __name__ == "__main__":
    _engines, _tests = pathlib.Path(__file__).resolve().parents[1:3]
    sys.path[:0] = map(str, (_engines, _engines / "with_vllm", _tests))

from fault_campaign import Campaign, Outcome, cases, table
from fault_vllm import write_model
from jobs import Jobs

AT_ONCE = 40  # faults of one engine


def campaigns(vllm: bool, busy: bool) -> Iterator[tuple[int, int, bool, float]]:
    """Ranks of the engine and of the trainer, whether copies can be undone, and the time-out."""
    settings = itertools.product((2, 1) if vllm else (2, 1, 4), (1, 2), (False,) if vllm else (False, True))
    for number, (world, trainers, undo) in enumerate(itertools.cycle(settings)):
        yield world, trainers, undo, 60.0 if busy else 8.0 if number % 3 == 2 else 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--busy", action="store_true", help="long time-outs, and no fault that outlasts them")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for world, trainers, undo, timeout in campaigns(given.vllm, given.busy):
        with (
            tempfile.TemporaryDirectory(prefix="tessera-") as folder,
            Jobs(pathlib.Path(folder), 36000.0, True) as jobs,
        ):
            model = write_model(folder) if given.vllm else ""
            campaign = Campaign(jobs, pathlib.Path(folder), world, trainers, undo, timeout, model=model)
            try:
                assert not campaign.meet()
                campaign.check_next()
                wanted = min(AT_ONCE, given.faults - len(outcomes))
                for case in itertools.islice(cases(random_, campaign), wanted):
                    outcome = campaign.run(case)
                    outcomes.append(outcome)
                    print(
                        f"{len(outcomes):5} {world}x{trainers} {case} {outcome.what} {outcome.error[:100]}", flush=True
                    )
                campaign.leave()
            finally:
                campaign.close()
        if len(outcomes) >= given.faults:
            break
    print(table(outcomes))
    print(
        f"{time.monotonic() - began:.0f} s; every engine answered, no mixed version was served, each next update worked"
    )


if __name__ == "__main__":
    main()
