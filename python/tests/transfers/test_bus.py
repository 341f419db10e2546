"""tessera.connect, register, send and recv between two jobs of this process."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback
from ranks import LIMIT, run

torch = pytest.importorskip("torch")


def trainer_model() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_goes_from_job_to_job() -> None:
    source, target = (
        trainer_model(),
        torch.nn.Sequential(
            *(
                type(m)(4) if isinstance(m, torch.nn.LayerNorm) else torch.nn.Linear(m.in_features, m.out_features)
                for m in trainer_model()
            )
        ),
    )

    def send(bus: tessera.Bus) -> list[int]:
        batch = bus.register(source)
        return [batch.send().version, batch.send(version=5).version]

    def recv(bus: tessera.Bus) -> list[int]:
        batch = bus.register(target)
        return [batch.recv(), batch.recv(min_version=5), batch.version]

    results = run({"trainer": [send], "inference": [recv]})
    assert results["trainer"] == [[1, 5]]
    assert results["inference"] == [[1, 5, 5]]
    assert same(source.state_dict(), target.state_dict())


def test_rows_of_two_ranks_become_columns_of_one_in_another_dtype() -> None:
    full = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    target = torch.zeros(7, 5, dtype=torch.bfloat16)

    def send(rank: int) -> Any:
        # The local tensor is registered: 7 rows in chunks of 4 and 3. Nobody gives the global shape.
        rows = full[4 * rank : 4 * rank + 4].clone()
        return lambda bus: bus.register({"w": (rows, "2:S0")}).send().version

    def recv(bus: tessera.Bus) -> int:
        return bus.register({"w": target}).recv()

    results = run({"trainer": [send(0), send(1)], "inference": [recv]})
    assert results == {"trainer": [1, 1], "inference": [1]}
    assert torch.equal(target, full.to(torch.bfloat16))


def test_local_shapes_that_no_split_gives_are_an_error_with_every_ranks_shape() -> None:
    over = threading.Barrier(3)

    def send(rows: int) -> Any:
        def work(bus: tessera.Bus) -> str:
            with pytest.raises(tessera.MismatchError) as caught:
                bus.register({"w": (np.zeros((rows, 5), np.float32), "2:S0")}, direction="send")
            over.wait(LIMIT)
            return str(caught.value)

        return work

    results = run({"trainer": [send(2), send(5)], "inference": [lambda bus: over.wait(LIMIT)]})
    for text in results["trainer"]:
        assert "tensor w: no tensor is split by 2:S0" in text
        assert "rank 0 (2, 5), rank 1 (5, 5)" in text
        assert "one of shape (7, 5) would be held as rank 0 (4, 5), rank 1 (3, 5)" in text


def test_a_handle_can_be_polled_and_awaited() -> None:
    value = np.arange(4, dtype=np.int64)
    target = np.zeros(4, np.int64)
    ready = threading.Event()

    def send(bus: tessera.Bus) -> int:
        batch = bus.register({"w": value}, direction="send")
        ready.wait(LIMIT)
        handle = batch.send(blocking=False)
        assert "send of default" in repr(handle)

        async def finish() -> int:
            return await handle

        return asyncio.run(asyncio.wait_for(finish(), LIMIT))

    def recv(bus: tessera.Bus) -> int:
        batch = bus.register({"w": target})
        handle = batch.recv(blocking=False)
        with pytest.raises(tessera.DeadlineExceededError, match="recv of default has not ended"):
            handle.wait(timeout=0)
        ready.set()
        assert handle.wait(LIMIT) == handle.version == 1
        assert handle.done() and handle.wait() == 1
        assert handle.progress.bytes_done == 32
        return batch.version

    assert run({"trainer": [send], "inference": [recv]}) == {"trainer": [1], "inference": [1]}
    assert target.tolist() == value.tolist()


def test_staged_versions_are_written_by_commit_alone() -> None:
    target = torch.zeros(8)
    taken = threading.Barrier(2)

    def send(bus: tessera.Bus) -> None:
        value = torch.ones(8)
        batch = bus.register({"w": value}, mode="staged")
        for _ in range(2):
            batch.send()
            taken.wait(LIMIT)
            value += 1

    def recv(bus: tessera.Bus) -> None:
        batch = bus.register({"w": target}, mode="staged")
        assert batch.wait_version(1, LIMIT) == 1
        before = target._version
        assert batch.stage() == 1
        assert target.sum() == 0 and batch.version == 0
        assert target._version == before  # nothing has been written
        assert batch.commit() == 1
        assert target.sum() == 8 and batch.version == 1
        assert target._version > before
        taken.wait(LIMIT)
        assert batch.recv() == 2 and batch.newest == 2
        assert target.sum() == 16
        before = target._version
        with pytest.raises(tessera.InvalidArgumentError, match="nothing is staged"):
            batch.commit()
        assert target._version == before
        taken.wait(LIMIT)

    run({"trainer": [send], "inference": [recv]})


def test_a_backward_across_a_receive_raises() -> None:
    model = torch.nn.Linear(3, 3)

    def recv(bus: tessera.Bus) -> None:
        batch = bus.register(model)
        x = torch.ones(2, 3, requires_grad=True)
        loss = model(x).sum()
        batch.recv()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(x).sum().backward()

    run({"trainer": [lambda bus: bus.register(torch.nn.Linear(3, 3)).send().version], "inference": [recv]})


def test_what_has_changed_since_is_an_error_that_names_it() -> None:
    model = torch.nn.Linear(3, 3)
    loose = {"kept": torch.zeros(4), "freed": torch.zeros(4)}

    def send(bus: tessera.Bus) -> None:
        batch = bus.register(model, "module")
        batch.send()
        model.weight.data = model.weight.data.to(torch.float64)
        with pytest.raises(tessera.InvalidArgumentError, match=r"tensor weight: its dtype has changed from f32 to f64"):
            batch.send()
        model.weight = None
        with pytest.raises(tessera.InvalidArgumentError, match="tensor weight: the module has no weight any more"):
            batch.send()
        batch = bus.register(loose, "dict", hold="weak")
        batch.send()
        kept = loose.pop("kept")
        kept.untyped_storage().resize_(4096)
        with pytest.raises(tessera.InvalidArgumentError, match="tensor kept: its storage was resized from 16 to 4096"):
            batch.send()
        loose.clear()
        kept.untyped_storage().resize_(16)
        gc.collect()
        with pytest.raises(
            tessera.InvalidArgumentError, match=r"tensor (freed: its memory was freed|kept: its memory)"
        ):
            batch.send()

    def recv(bus: tessera.Bus) -> None:
        bus.register(torch.nn.Linear(3, 3), "module").recv()
        values = {"kept": torch.zeros(4), "freed": torch.zeros(4)}
        bus.register(values, "dict").recv()

    run({"trainer": [send], "inference": [recv]})


def test_names_are_chosen_and_what_the_sender_lacks_may_be_missing() -> None:
    def send(bus: tessera.Bus) -> tuple[str, ...]:
        values = {f"layer{i}.{name}": torch.full((2,), float(i)) for i in range(3) for name in ("weight", "bias")}
        batch = bus.register({"model": values, "step": 3, "optim": [None]}, only=r"model\..*", ignore=[r".*layer1.*"])
        batch.send()
        return batch.names

    def recv(bus: tessera.Bus) -> tuple[tuple[str, ...], tuple[str, ...]]:
        wanted = {f"model.layer{i}.weight": torch.zeros(2) for i in range(3)}
        strict = bus.register(wanted, "strict")
        del strict
        batch = bus.register(wanted, missing_ok=True, ignore=lambda name: "layer0" in name)
        batch.recv()
        assert wanted["model.layer2.weight"].tolist() == [2, 2]
        return batch.names, batch.skipped

    results = run({"trainer": [send], "inference": [recv]})
    assert results["trainer"] == [
        ("model.layer0.weight", "model.layer0.bias", "model.layer2.weight", "model.layer2.bias")
    ]
    assert results["inference"] == [(("model.layer2.weight",), ("model.layer1.weight",))]


GIVEN = {"layer.weight": np.zeros(2), "layer.bias": np.zeros(2), "step": 3}


@pytest.mark.parametrize(
    ("tensors", "options", "why"),
    [
        (
            GIVEN,
            {"only": "typo"},
            r"only='typo' leaves nothing of the 3 names given \(layer\.weight, layer\.bias, step\): a pattern matches "
            r"whole names; .* registers \{\}",
        ),
        (GIVEN, {"only": "weight"}, "only='weight' leaves nothing of the 3 names"),
        (
            GIVEN,
            {"only": [r".*\.weight"], "ignore": "layer.*"},
            r"only=\['\.\*.*weight'\] and ignore='layer\.\*' leaves nothing",
        ),
        (GIVEN, {"ignore": lambda name: True}, r"ignore=<function .*> leaves nothing of the 3 names"),
        (GIVEN, {"map": {".*": None}}, "map=.* leaves nothing of the 3 names"),
        (
            {str(i): np.zeros(1) for i in range(9)},
            {"only": "typo"},
            r"only='typo' .* 9 names given \(0, 1, 2, 3, \.\.\.\)",
        ),
        ({"step": 3}, {}, r"there is no tensor in what was given \(step\)"),
        ({}, {}, r"there is no tensor in what was given \(no names\)"),
        ({}, {"only": "typo"}, r"there is no tensor in what was given \(no names\)"),
    ],
)
def test_a_registration_in_which_nothing_is_left_is_refused(
    tensors: Any, options: Any, why: str, loopback: Loopback
) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=f"batch again: {why}"):
        loopback.trainer.register(tensors, "again", **options)
    loopback.trainer.register(GIVEN, "again").close()  # nothing is left behind


def test_a_rank_may_have_nothing_of_a_batch() -> None:
    """None of its tensors, none of their elements, or none that the sender has."""
    value, taken = np.arange(3), np.zeros(3, np.int64)
    rows, taken_row = np.arange(1), np.zeros(1, np.int64)
    nothing = np.zeros(0, np.int64)

    def send(tensors: Any) -> Any:
        return lambda bus: bus.register(tensors).send().version

    def recv(tensors: Any, **options: Any) -> Any:
        return lambda bus: bus.register(tensors, **options).recv()

    results = run(
        {
            "trainer": [send({"w": value, "rows": (rows, "2:S0")}), send({"rows": (nothing, "2:S0")}), send({})],
            "inference": [
                recv({"w": taken, "rows": taken_row}),
                recv({}),
                recv({"theirs": np.zeros(2)}, missing_ok=True),
            ],
        }
    )
    assert results == {"trainer": [1, 1, 1], "inference": [1, 1, 1]}
    assert taken.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "in-place"}, "mode 'in-place': 'inplace' and 'staged' are possible"),
        ({"mode": None}, "mode None: 'inplace' and 'staged' are possible"),
        ({"direction": "receive"}, "direction 'receive': 'send' and 'recv' are possible"),
    ],
)
def test_a_mode_or_direction_that_does_not_exist_is_refused_at_once(options: Any, why: str, loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        loopback.register(GIVEN, **options)


def test_a_name_that_only_the_receiver_has_is_an_error_on_both_sides() -> None:
    def register(bus: tessera.Bus, name: str, direction: Any) -> str:
        with pytest.raises(tessera.Error) as caught:
            bus.register({name: torch.zeros(2), "w": torch.zeros(2)}, direction=direction)
        return str(caught.value)

    results = run(
        {
            "trainer": [lambda bus: register(bus, "theirs", "send")],
            "inference": [lambda bus: register(bus, "ours", "recv")],
        }
    )
    assert all("ours" in text for of_job in results.values() for text in of_job)


def test_tied_receivers_need_one_of_their_names() -> None:
    tied = torch.zeros(3)

    def recv(bus: tessera.Bus) -> tuple[str, ...]:
        batch = bus.register({"embed": tied, "head": tied})
        batch.recv()
        return batch.names

    ones = torch.ones(3)
    results = run({"trainer": [lambda bus: bus.register({"embed": ones}).send().version], "inference": [recv]})
    assert results["inference"] == [("embed",)]
    assert tied.tolist() == [1, 1, 1]


@pytest.mark.parametrize("one_object", [True, False])
def test_a_tied_receiver_may_hold_nothing(one_object: bool) -> None:
    """Rank 0 has one memory under two names; rank 1 holds nothing of it."""

    def recv(bus: tessera.Bus) -> tuple[str, ...]:
        held = torch.zeros(1 - bus.rank, 3)
        head = held if one_object else held.view_as(held)
        batch = bus.register({name: (each, "2:S0", (1, 3)) for name, each in {"embed": held, "head": head}.items()})
        batch.recv()
        assert (held == 1).all()
        return batch.names

    ones = torch.ones(1, 3)
    results = run({"trainer": [lambda bus: bus.register({"embed": ones}).send().version], "inference": [recv, recv]})
    assert results["inference"] == [("embed",)] * 2


def test_one_direction_a_batch_and_one_batch_a_name() -> None:
    def send(bus: tessera.Bus) -> None:
        value = torch.zeros(2)
        batch = bus.register({"w": value})
        with pytest.raises(tessera.AlreadyExistsError, match="batch default of pair weights is registered already"):
            bus.register({"w": value})
        batch.send()
        with pytest.raises(tessera.InvalidArgumentError, match="it sends; register another batch"):
            batch.recv()
        batch.close()
        batch.close()
        with pytest.raises(tessera.InvalidArgumentError, match="it is closed"):
            batch.send()

    def recv(bus: tessera.Bus) -> None:
        value = torch.zeros(2)
        with bus.register({"w": value}) as batch:
            batch.recv()
        assert "closed" in repr(batch)

    run({"trainer": [send], "inference": [recv]})


def test_a_batch_that_is_dropped_says_so_and_closes_in_the_background() -> None:
    def send(bus: tessera.Bus) -> None:
        value = torch.zeros(2)
        batch = bus.register({"w": value})
        batch.send()
        bus._batches.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del batch
            gc.collect()
        assert any(
            issubclass(each.category, ResourceWarning) and "was not closed" in str(each.message) for each in caught
        )
        for thread in threading.enumerate():
            if thread.name == "tessera-close":
                thread.join(LIMIT)

    def recv(bus: tessera.Bus) -> None:
        value = torch.zeros(2)
        batch = bus.register({"w": value})
        batch.recv()
        with pytest.raises(tessera.PeerLostError):
            batch.recv(timeout=LIMIT)

    run({"trainer": [send], "inference": [recv]})


def test_nobody_comes() -> None:
    with pytest.raises(tessera.DeadlineExceededError, match="missing: .*inference") as caught:
        tessera.connect("weights", role="trainer", peer="inference", rank=0, world=1, namespace="alone", timeout=1)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(tessera.InvalidArgumentError, match="rank 3 of world 2"):
        tessera.connect("weights", role="trainer", peer="inference", rank=3, world=2)
    with pytest.raises(tessera.InvalidArgumentError, match="cannot be paired with itself"):
        tessera.connect("weights", role="trainer", peer="trainer", rank=0, world=1, namespace="alone")


def test_what_they_are_shows_itself() -> None:
    offered = threading.Event()

    def send(bus: tessera.Bus) -> list[str]:
        batch = bus.register({"w": np.ones((4, 2), np.float32), "only": np.ones(1, np.float32)}, "policy")
        handle = batch.send()
        offered.wait(LIMIT)
        return [repr(bus), repr(handle.progress)]

    def recv(bus: tessera.Bus) -> list[str]:
        batch = bus.register({"w": np.zeros((4, 2), np.float32)}, "policy")
        before = repr(batch)
        batch.recv()
        said = [repr(bus), before, repr(batch), repr(batch.stats), *map(repr, bus.manifest("policy"))]
        offered.set()
        bus.close()
        return [*said, repr(bus)]

    results = run({"trainer": [send], "inference": [recv]})
    trainer, progress = results["trainer"][0]
    assert trainer == "Bus('weights': trainer/0 of 1, peer inference of 1, 1 batches)"
    assert re.fullmatch(r"Progress\(32 of 32 bytes, \d+\.\d{3} s, \d+\.\d\d GB/s\)", progress)
    assert results["inference"][0] == [
        "Bus('weights': inference/0 of 1, peer trainer of 1, 1 batches)",
        "Batch(weights/policy: 1 tensors, inplace, not yet transferred, version 0)",
        "Batch(weights/policy: 1 tensors, inplace, receives, version 1)",
        "BatchStats(1 tensors, 1 skipped, 1 routes, 32 bytes moved, 1 transfers)",
        'ManifestEntry("w", f32 4x2 1:R)',
        'ManifestEntry("only", f32 1 1:R)',
        "Bus('weights': inference/0 of 1, peer trainer of 1, closed)",
    ]
