"""The command tessera-engines, and what it says of maps."""

import json
import subprocess
import sys

import pytest
from engine_marks import needs_vllm
from loaders import LOADERS
from tessera import engines
from tessera.engines.__main__ import main
from tessera.engines._report import Report
from vllm_configs import CONFIGS, save_configuration


def report(name, world):
    loadings = [LOADERS[name](rank, world) for rank in range(world)]
    maps = [engines.learn_map(each.model, each.checkpoint) for each in loadings]
    return Report(loadings[0].checkpoint, maps)


def test_boxes_of_each_rank_are_told():
    lines = list(report("fused", 2).text())
    assert lines[:6] == [
        "q  8x8 bfloat16",
        "    rank 0: [0:4, 0:8]",
        "    rank 1: [4:8, 0:8]",
        "k  2x8 bfloat16",
        "    each rank: all of it",
        "v  2x8 bfloat16",
    ]
    assert lines[-4:] == [
        "",
        "rank 0: 400 B in 7 slices, 55.6 % of the checkpoint",
        "rank 1: 400 B in 7 slices, 55.6 % of the checkpoint",
        "computed: nothing; each element of the engine's parameters is a copy, or padding",
    ]


def test_tensors_that_are_held_alike_are_one_entry():
    of = report("experts", 1)
    assert "{0-3}.w1  6x8 bfloat16  (4 tensors)" in list(of.text())
    assert "0.w1  6x8 bfloat16" in list(of.text(every_layer=True))
    assert len(list(of.text(every_layer=True))) - len(list(of.text())) == 2 * 3 * 3


def test_what_no_rank_takes_is_told():
    of = report("padded_vocabulary", 2)
    assert list(of.text())[3:5] == ["rotary  4 float32", "    taken by no rank"]
    told = of.json()
    assert told["unused"] == ["rotary"]
    assert [each["untouched"] for each in told["ranks"]] == [{}, {"embedding": 5 * 8}]
    assert [each["boxes"] for each in told["tensors"][0]["ranks"]] == [
        [[[0, 8, 1], [0, 8, 1]]],
        [[[8, 11, 1], [0, 8, 1]]],
    ]


def test_what_is_computed_is_told_with_the_whole_tensors_that_it_needs():
    loading = LOADERS["fused"](0, 1)
    loading.model.norm.weight_loader = lambda parameter, tensor, key: parameter.data.copy_(-tensor.exp())
    of = Report(loading.checkpoint, [engines.learn_map(loading.model, loading.checkpoint)])
    assert list(of.text())[-2:] == [
        "computed by the loader, which needs 1 whole tensors for it:",
        "    norm: it is computed by aten.neg.default",
    ]
    assert of.nbytes_of(0) == of.nbytes and of.json()["ranks"][0]["by_loader"] == ["norm"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["map", "/nowhere", "--tp", "2"], "/nowhere: give the folder of a model, with its config.json, or that file"),
        (["map", "/nowhere", "--tp", "0"], "--tp 0: give 1 to 4096"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"tessera-engines: {error}\n")


def test_without_vllm_it_tells_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["map", str(save_configuration(CONFIGS["llama"], tmp_path))]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err


def test_unknown_subcommands_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["maps"])
    assert ended.value.code == 2 and "invalid choice: 'maps'" in capsys.readouterr().err


@needs_vllm
def test_it_asks_vllm(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tessera.engines",
        "map",
        str(save_configuration(CONFIGS["qwen3_moe"], tmp_path) / "config.json"),
    ]
    done = subprocess.run([*command, "--tp", "4", "--json"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["engine"], told["model"]) == ("vllm", "Qwen3MoeForCausalLM")
    tensors = {each["name"]: each for each in told["tensors"]}
    key = tensors["model.layers.1.self_attn.k_proj.weight"]  # of 2 heads: two ranks each have one
    assert [each["boxes"][0][0] for each in key["ranks"]] == [[0, 32, 1]] * 2 + [[32, 64, 1]] * 2
    assert key["parameters"] == ["model.layers.1.self_attn.qkv_proj.weight"]
    expert = tensors["model.layers.0.mlp.experts.5.down_proj.weight"]
    assert [each["bytes"] for each in expert["ranks"]] == [128 * 64 * 2 // 4] * 4
    assert all(0.25 < each["share"] < 0.3 and each["computed"] == {} for each in told["ranks"])


@needs_vllm
def test_what_vllm_refuses_is_told(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tessera.engines",
        "map",
        str(save_configuration(CONFIGS["llama"], tmp_path)),
        "--tp",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "vLLM refuses it: " in done.stderr and "Traceback" not in done.stderr
