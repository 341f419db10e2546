"""Other programs' checkpoints, and other programs that read these."""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
from typing import Any

import pytest
import tessera
import torch
from etp_models import WORDS, Tied, as_bytes, built
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from saved_files import bytes_of, index_of, tensors_of
from tessera import checkpoint, etp
from torch_ranks import launch

transformers = pytest.importorskip("transformers")
COMMAND = pathlib.Path(tessera.__file__).parent / "bin" / "tessera"


def _config(**changed: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **changed,
    )


def _llama(seed: int, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(_config(**changed))


def _on_two(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    found = {}
    with etp.init_group(timeout=60) as group:
        for kind in ("tied", "untied"):
            tied = kind == "tied"
            model = etp.shard_module_(_llama(1, tie_word_embeddings=tied), group, min_elements=256)
            checkpoint.save(model, None, folder / f"{kind}-ours")
            for source in ("one", "several"):
                model = etp.shard_module_(_llama(3, tie_word_embeddings=tied), group, min_elements=256)
                loaded = checkpoint.load(model, None, folder / f"{kind}-{source}")
                with etp.summon(model):
                    found[f"{kind}, {source}"] = bytes_of(dict(model.named_parameters())), loaded
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("readers")
    for kind in ("tied", "untied"):
        model = _llama(2, tie_word_embeddings=kind == "tied")
        model.save_pretrained(folder / f"{kind}-one")
        model.save_pretrained(folder / f"{kind}-several", max_shard_size="20KB")
        assert len(list((folder / f"{kind}-several").glob("*.safetensors"))) > 1
    return folder, launch(functools.partial(_on_two, folder=folder), 2)


@pytest.mark.parametrize("source", ["one", "several"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_what_transformers_has_saved_is_loaded(results: Any, kind: str, source: str) -> None:
    expected = bytes_of(dict(_llama(2, tie_word_embeddings=kind == "tied").named_parameters()))
    for found in results[1]:
        weights, loaded = found[f"{kind}, {source}"]
        assert weights == expected
        assert loaded.metadata["format"] == "pt"


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_transformers_loads_what_ranks_have_saved(results: Any, kind: str) -> None:
    folder = results[0] / f"{kind}-ours"
    expected = _llama(1, tie_word_embeddings=kind == "tied")
    expected.config.save_pretrained(folder)
    model, said = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    assert bytes_of(dict(model.named_parameters())) == bytes_of(dict(expected.named_parameters()))


def test_a_tied_weight_is_in_the_file_once_under_its_first_name(tmp_path: pathlib.Path) -> None:
    checkpoint.save(built(), None, tmp_path / "ours")
    assert "emb.weight" in index_of(tmp_path / "ours")["weight_map"]
    assert "head.weight" not in index_of(tmp_path / "ours")["weight_map"]
    (name,) = set(index_of(tmp_path / "ours")["weight_map"].values())
    again = built(seed=8)
    load_model(again, tmp_path / "ours" / name)  # safetensors' own
    assert as_bytes(again.head.weight) == as_bytes(built().emb.weight)


@pytest.mark.parametrize("kept", [["emb.weight"], ["head.weight"], ["emb.weight", "head.weight"]])
def test_a_tied_weight_is_loaded_under_any_of_its_names(tmp_path: pathlib.Path, kept: list[str]) -> None:
    state = {name: tensor.clone() for name, tensor in built().state_dict().items() if "." in name}
    others = {name: tensor for name, tensor in state.items() if name not in ("emb.weight", "head.weight")}
    save_file({**others, **{name: state[name] for name in kept}}, tmp_path / "m.safetensors")
    model = built(seed=8)
    checkpoint.load(model, None, tmp_path / "m.safetensors")
    assert bytes_of(model.state_dict()) == bytes_of(state)
    assert model.head.weight is model.emb.weight


def test_what_safetensors_has_saved_is_loaded(tmp_path: pathlib.Path) -> None:
    save_model(built(), str(tmp_path / "m.safetensors"), {"made": "by hand"})
    model = built(seed=8)
    loaded = checkpoint.load(model, None, tmp_path)
    assert loaded.metadata["made"] == "by hand"
    assert bytes_of(model.state_dict()) == bytes_of(built().state_dict())


def test_metadata_is_where_readers_of_safetensors_look(tmp_path: pathlib.Path) -> None:
    checkpoint.save(built(), None, tmp_path / "ours", metadata={"step": "7", "né": '"\\'})
    for path in (tmp_path / "ours").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "step": "7", "né": '"\\'}


def test_wrappers_do_not_change_names(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[1] = torch.compile(model[1])
    checkpoint.save(model, None, tmp_path / "ours")
    assert [*tensors_of(tmp_path / "ours")] == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_the_command_reads_it(tmp_path: pathlib.Path) -> None:
    checkpoint.save(built(Tied), None, tmp_path / "ours")
    if not COMMAND.exists():
        pytest.skip("the command is not built")
    arguments = ["plan", "--checkpoint", str(tmp_path / "ours"), "--src", ".*=2:S0", "--dst", ".*=1:R", "--json"]
    said = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=True).stdout
    assert f"[{WORDS}," in json.dumps(json.loads(said))


def test_strided_memory_and_buffers(tmp_path: pathlib.Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.turned = torch.nn.Parameter(torch.randn(5, 3).t())
            self.image = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.register_buffer("kept", torch.randn(3).to(torch.float8_e4m3fn))
            self.register_buffer("flags", torch.rand(4) > 0.5)
            self.register_buffer("dropped", torch.randn(3), persistent=False)

    checkpoint.save(Odd(1), None, tmp_path / "ours")
    model = Odd(2)
    strides = [each.stride() for each in (model.turned, model.image)]
    checkpoint.load(model, None, tmp_path / "ours")
    assert bytes_of(model.state_dict()) == bytes_of(Odd(1).state_dict()) == bytes_of(tensors_of(tmp_path / "ours"))
    assert [each.stride() for each in (model.turned, model.image)] == strides


def test_it_goes_through_the_command_and_back(tmp_path: pathlib.Path) -> None:
    """Saved, sent as it is, received as rows by two ranks, and loaded from their files."""
    if not COMMAND.exists():
        pytest.skip("the command is not built")
    checkpoint.save(built(), None, tmp_path / "ours")
    common = ["--timeout", "60", "--namespace", tmp_path.name]
    ends = [["send", "--job", "a", "--peer", "b", "--checkpoint", tmp_path / "ours", "--layout", ".*=1:R", *common]]
    for rank in ("0", "1"):
        layouts = ["--layout", ".*weight=2:S0", "--layout", ".*=2:R"]
        place = ["--job", "b", "--peer", "a", "--rank", rank, "--world", "2", "--out", tmp_path / "out"]
        ends.append(["recv", *place, *layouts, *common])
    running = [
        subprocess.Popen([COMMAND, *each], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for each in ends
    ]
    for process in running:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
    model = built(seed=8)
    assert checkpoint.load(model, None, tmp_path / "out").metadata["version"] == "1"
    assert bytes_of(model.state_dict()) == bytes_of(built().state_dict())
