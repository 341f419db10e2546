"""Updates of a real `vllm serve`; see scripts/engines.sh. bench/engines/updates.py runs many more."""

import pytest

pytest.importorskip("vllm")

import torch
import vllm_configs as configs
from tessera import UnavailableError
from tessera.engines.vllm import Trainer
from vllm_server import Reference, Server

LENGTH = 6
DENSE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
SPARSE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "ranks", "in_place"),
    [("llama", DENSE, 2, True), ("qwen3_moe", SPARSE, 1, False)],
    ids=["exchanged on two ranks", "packed"],
)
def test_each_version_answers_as_transformers_do(name, sizes, ranks, in_place, tmp_path):
    configs.save_configuration(configs.configuration(name, 1, **sizes), tmp_path)
    reference = Reference(tmp_path)
    reference.model.save_pretrained(tmp_path)
    weights = reference.fill(0)
    with (
        Server(tmp_path, ranks, in_place=in_place) as server,
        Trainer(weights, {"server": server.url}, rank=0, world=1, timeout=600) as trainer,
    ):
        answers = set()
        for version in (1, 2, 3):
            for key, each in reference.fill(version).items():
                weights[key].copy_(each)
            update = trainer.send(version)["server"]
            assert update.ok and update.version == version, update
            assert server.get("/weight_info")["weight_version"] == str(version)
            certain = reference.certain(version, LENGTH)
            assert certain
            for prompt, expected in certain[:2]:
                assert server.tokens(prompt, LENGTH) == expected
                answers.add(tuple(expected))
        assert len(answers) > 3
        counts = server.counts()
    whole = sum(each.nbytes for each in weights.values())
    assert [each["received"] for each in counts] == [each["share"] for each in counts]
    assert all(each["received"] <= 0.6 * whole if ranks == 2 else each["received"] == whole for each in counts)
    assert all((each.exchanged > 0) == in_place and (each.rebuilt > 0) != in_place for each in update.ranks)


def test_two_replicas_take_each_version(tmp_path):
    """Of a dense model: one with experts ends at its first request on a CPU, without an update, too."""
    configs.save_configuration(configs.configuration("llama", 1, **DENSE), tmp_path)
    reference = Reference(tmp_path)
    reference.model.save_pretrained(tmp_path)
    weights = {key: torch.clone(each) for key, each in reference.fill(0).items()}
    with Server(tmp_path, options=("--data-parallel-size", "2")) as server:
        with pytest.raises(UnavailableError, match="give its Trainer data_parallel=2"):
            Trainer(weights, {"server": server.url}, rank=0, world=1, timeout=600)
        with Trainer(weights, {"server": server.url}, rank=0, world=1, timeout=600, data_parallel=2) as trainer:
            for version in (1, 2, 3):
                for key, each in reference.fill(version).items():
                    weights[key].copy_(each)
                update = trainer.send(version)["server"]
                assert update.ok and [each.version for each in update.ranks] == [version, version], update
                assert server.get("/weight_info")["weight_version"] == str(version)
                certain = reference.certain(version, LENGTH)
                assert len(certain) >= 4  # requests go to one replica after the other
                assert all(server.tokens(prompt, LENGTH) == expected for prompt, expected in certain[:8])
                assert {server.shown([5, 6, each]) for each in range(8)} == {str(version)}  # by both HTTP processes


def test_a_version_that_never_comes_leaves_the_one_before(tmp_path):
    configs.save_configuration(configs.configuration("llama", 1, hidden_size=128, head_dim=32), tmp_path)
    reference = Reference(tmp_path)
    reference.model.save_pretrained(tmp_path)
    weights = {key: torch.clone(each) for key, each in reference.fill(1).items()}
    with Server(tmp_path) as server, Trainer(weights, {"server": server.url}, rank=0, world=1, timeout=600) as trainer:
        assert trainer.send(1)["server"].ok
        (prompt, expected), *_ = reference.certain(1, LENGTH)
        (status,) = server.post("/collective_rpc", {"method": "tessera_receive", "args": [9, 1]})["results"]
        while status["busy"]:
            (status,) = server.post("/collective_rpc", {"method": "tessera_status"})["results"]
        (status,) = server.post("/collective_rpc", {"method": "tessera_commit"})["results"]
        assert not status["verdict"]["ok"] and "DeadlineExceeded" in status["verdict"]["error"]
        assert status["version"] == 1
        assert server.tokens(prompt, LENGTH) == expected
        for key, each in reference.fill(2).items():
            weights[key].copy_(each)
        assert trainer.send(2)["server"].ok
        (prompt, expected), *_ = reference.certain(2, LENGTH)
        assert server.tokens(prompt, LENGTH) == expected
