"""TensorBusClient: the same bus with another interface."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tessera
from ranks import LIMIT
from tessera.tensor_bus import BatchHandler, TensorBusClient

torch = pytest.importorskip("torch")


def run(namespace: str, *works: Callable[[TensorBusClient], Any], ranks: tuple[int, ...]) -> list[Any]:
    """One thread for each rank."""

    def work(number: int) -> Any:
        with TensorBusClient(agent_rank=ranks[number], namespace=namespace) as client:
            return works[number](client)

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work, number) for number in range(len(works))]
        return [future.result(LIMIT) for future in futures]


def test_tensors_match_by_position_and_shapes_follow_from_all_ranks() -> None:
    full = [torch.arange(21.0).reshape(7, 3), torch.arange(4.0)]

    def train(rank: int) -> Callable[[TensorBusClient], Any]:
        def work(client: TensorBusClient) -> Any:
            mesh = tessera.Mesh((2,), ("dp",))
            client.init_pair("weights", "trainer", "inference", 2, device_mesh=mesh, placements=(tessera.Shard(0),))
            local = [tensor.chunk(2)[rank].clone() for tensor in full]
            handler = client.register_tensors("policy", [(tensor, "weights") for tensor in local])
            handle = handler.transfer("send", blocking=True)
            assert handler.query_transfer_signal()
            return handle.version

        return work

    def infer(client: TensorBusClient) -> Any:
        client.init_pair(
            pair_name="weights", local_name="inference", remote_name="trainer", expected_world_size=1, timeout=LIMIT
        )
        local = [torch.zeros(7, 3), torch.zeros(4)]
        handler = client.register_tensors(batch_id="policy", tensors=[(tensor, "weights") for tensor in local])
        assert isinstance(handler, BatchHandler)
        end = time.monotonic() + LIMIT
        while not handler.query_transfer_signal():
            assert time.monotonic() < end
            time.sleep(0.01)
        handler.transfer("recv")
        assert not handler.query_transfer_signal()
        return all(torch.equal(a, b) for a, b in zip(local, full, strict=True))

    assert run("positions", train(0), train(1), infer, ranks=(0, 1, 0)) == [1, 1, True]


def test_a_batch_over_two_pairs() -> None:
    dense, expert = torch.arange(6.0), torch.arange(8.0).reshape(2, 4)

    def train(client: TensorBusClient) -> int:
        client.init_pair("weights", "trainer", "inference", 1)
        client.init_pair("experts", "trainer", "inference", 1)
        return client.register_tensors("policy", [(dense, "weights"), (expert, "experts")]).transfer("send").version

    def infer(client: TensorBusClient) -> bool:
        client.init_pair("weights", "inference", "trainer", 1)
        client.init_pair("experts", "inference", "trainer", 1)
        local = [torch.zeros(6), torch.zeros(2, 4)]
        handler = client.register_tensors("policy", [(local[0], "weights"), (local[1], "experts")])
        handler.transfer("recv")
        assert "experts+weights/policy" in repr(handler)
        return torch.equal(local[0], dense) and torch.equal(local[1], expert)

    assert run("pairs", train, infer, ranks=(0, 0)) == [1, True]


@pytest.mark.parametrize("wire", ["nvfp4", ["nvfp4", None, "mxfp8"]])
def test_a_format_for_all_tensors_or_one_for_each(wire: Any) -> None:
    full = [torch.randn(32, 64), torch.randn(48, 32), torch.randn(16, 32), torch.randn(7)]
    wires = [*([wire] * 3 if isinstance(wire, str) else wire), None]

    def train(client: TensorBusClient) -> int:
        client.init_pair("weights", "trainer", "inference", 1)
        asked = wire if isinstance(wire, str) else wires
        handler = client.register_tensors("policy", [(tensor, "weights") for tensor in full], wire=asked)
        handler.transfer("send")
        return handler.batch.stats.quantized_elements

    def infer(client: TensorBusClient) -> list[Any]:
        client.init_pair("weights", "inference", "trainer", 1)
        local = [torch.zeros_like(tensor) for tensor in full]
        client.register_tensors("policy", [(tensor, "weights") for tensor in local]).transfer("recv")
        return local

    quantised, taken = run("formats", train, infer, ranks=(0, 0))
    assert quantised == sum(tensor.numel() for tensor, wire in zip(full, wires, strict=True) if wire)
    for tensor, sent, each in zip(taken, full, wires, strict=True):
        assert torch.equal(tensor, tessera.quantize(sent, each).dequantize() if each else sent)


def test_wrong_arguments_are_errors_that_name_them() -> None:
    met = threading.Barrier(2)

    def train(client: TensorBusClient) -> None:
        client.init_pair("weights", "trainer", "inference", 1)
        with pytest.raises(tessera.AlreadyExistsError, match="pair weights"):
            client.init_pair("weights", "trainer", "inference", 1)
        with pytest.raises(tessera.NotFoundError, match="tensor 1: pair 'experts' was not init.*there are: weights"):
            client.register_tensors("policy", [(torch.zeros(2), "weights"), (torch.zeros(2), "experts")])
        with pytest.raises(tessera.InvalidArgumentError, match="batch policy: it has no tensors"):
            client.register_tensors("policy", [])
        with pytest.raises(tessera.InvalidArgumentError, match="tensor 0: it is on the meta device"):
            client.register_tensors("policy", [(torch.zeros(2, device="meta"), "weights")])
        with pytest.raises(tessera.InvalidArgumentError, match="device_mesh and placements, or neither"):
            client.init_pair("more", "trainer", "inference", 1, device_mesh=tessera.Mesh((1,)))
        value = torch.zeros(2)
        for wire, text in ((["nvfp4"] * 2, "2 formats for 1 tensors"), (4, "wire 4: give"), ("fp4", "unknown format")):
            with pytest.raises(tessera.InvalidArgumentError, match=text):
                client.register_tensors("policy", [(value, "weights")], wire=wire)  # type: ignore[arg-type]
        handler = client.register_tensors("policy", [(value, "weights")])
        with pytest.raises(tessera.AlreadyExistsError, match="batch policy"):
            client.register_tensors("policy", [(value, "weights")])
        with pytest.raises(tessera.InvalidArgumentError, match="direction 'push': 'send' and 'recv' are possible"):
            handler.transfer("push")  # type: ignore[arg-type]
        with pytest.raises(tessera.DeadlineExceededError, match="inference/0"):
            handler.transfer("send", timeout=0.2)
        met.wait(LIMIT)

    def infer(client: TensorBusClient) -> None:
        client.init_pair("weights", "inference", "trainer", 1)
        met.wait(LIMIT)

    run("wrong", train, infer, ranks=(0, 0))


def one_of_each(sent: int, taken: int, send: Callable[[BatchHandler], Any], recv: Callable[[BatchHandler], Any]) -> Any:
    """A job that lists `sent` tensors and one that lists `taken`: what they do with their handlers."""

    def job(
        count: int, names: tuple[str, str], work: Callable[[BatchHandler], Any]
    ) -> Callable[[TensorBusClient], Any]:
        def run(client: TensorBusClient) -> Any:
            client.init_pair("weights", *names, expected_world_size=1, timeout=LIMIT)
            tensors = [torch.full((2,), float(position)) for position in range(count)]
            return work(client.register_tensors("policy", [(each, "weights") for each in tensors], LIMIT / 2))

        return run

    namespace = f"one{sent}{taken}{send.__name__}"
    return run(
        namespace,
        job(sent, ("trainer", "inference"), send),
        job(taken, ("inference", "trainer"), recv),
        ranks=(0, 0),
    )


@pytest.mark.parametrize(("sent", "taken"), [(3, 2), (3, 1), (2, 3)])
def test_another_number_of_tensors_is_an_error_on_both_sides(sent: int, taken: int) -> None:
    ended = threading.Barrier(2)

    def counted(direction: Any) -> Callable[[BatchHandler], list[str]]:
        def work(handler: BatchHandler) -> list[str]:
            said = []
            for _ in range(2):
                with pytest.raises(tessera.MismatchError) as caught:
                    handler.transfer(direction, timeout=5)
                said.append(str(caught.value))
                ended.wait(LIMIT)
            assert handler.batch.version == 0
            return said

        return work

    said = one_of_each(sent, taken, counted("send"), counted("recv"))
    if sent > taken:
        assert all(
            text.startswith(f"batch policy: {sent} tensors are listed here and {taken} by the") for text in said[0]
        )
        assert all(
            text.startswith(f"batch policy: {taken} tensors are listed here and {sent} by the") for text in said[1]
        )
    else:
        assert all("tensor 2: trainer does not offer it" in text for of_job in said for text in of_job)


def test_a_job_that_asks_before_its_first_send_is_told_so() -> None:
    ended = threading.Barrier(2)

    def send(handler: BatchHandler) -> None:
        assert not handler.query_transfer_signal()
        began = time.monotonic()
        with pytest.raises(tessera.InvalidArgumentError, match="batch policy: it is being registered as a"):
            handler.transfer("send")
        assert time.monotonic() - began < 15, "nobody is waited for"
        handler.close()
        ended.wait(LIMIT)

    one_of_each(1, 1, send, lambda handler: ended.wait(LIMIT))


def test_what_they_are_shows_itself() -> None:
    def send(handler: BatchHandler) -> str:
        handler.transfer("send")
        return repr(handler)

    def recv(handler: BatchHandler) -> str:
        handler.transfer("recv")
        return repr(handler)

    sent, taken = one_of_each(2, 2, send, recv)
    assert sent == "BatchHandler(Batch(weights/policy: 2 tensors, inplace, sends, version 1))"
    assert taken == "BatchHandler(Batch(weights/policy: 2 tensors, inplace, receives, version 1))"
    client = TensorBusClient(agent_rank=3)
    assert repr(client) == "TensorBusClient(agent_rank=3, pairs [], batches [])"


def test_one_client_sends_to_several_jobs() -> None:
    value = torch.arange(6.0)

    def train(client: TensorBusClient) -> dict[str, Any]:
        client.init_pair("weights", "trainer", ["engine0", "engine1"], 1)
        handler = client.register_tensors("policy", [(value, "weights")], timeout=LIMIT)
        handler.batch.wait_peers(2, timeout=LIMIT)
        return {name: peer.version for name, peer in handler.transfer("send").peers.items()}

    def infer(name: str) -> Callable[[TensorBusClient], Any]:
        def work(client: TensorBusClient) -> Any:
            client.init_pair("weights", name, "trainer", 1, timeout=LIMIT)
            local = torch.zeros(6)
            client.register_tensors("policy", [(local, "weights")], timeout=LIMIT).transfer("recv", timeout=LIMIT)
            return local

        return work

    versions, *taken = run("several", train, infer("engine0"), infer("engine1"), ranks=(0, 0, 0))
    assert versions == {"engine0": 1, "engine1": 1}
    assert all(torch.equal(each, value) for each in taken)
