"""Experts that are one parameter are weights by themselves: what is gathered, what travels, and states."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import etp_stacks_scenarios
import pytest
import torch
import torch.distributed.checkpoint as dcp
from etp_models import (
    HIDDEN,
    WIDTH,
    Run,
    adamw,
    as_bytes,
    built,
    on_grid,
    on_ranks,
    plainly,
    scenarios_of,
)
from etp_stacks_scenarios import EMPTY, EXPERTS, OPTIONS, SKIPPED, Experts, Model, Whole, loss_of
from tessera import etp
from torch_ranks import launch

SCENARIOS = scenarios_of(vars(etp_stacks_scenarios))
LACKING = set() if hasattr(torch, "_grouped_mm") else {"grouped"}
EXPERT = WIDTH * HIDDEN * 4  # bytes


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    return request.param, on_ranks({name: SCENARIOS[name] for name in SCENARIOS.keys() - LACKING}, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    if name in LACKING:
        pytest.skip("torch has no _grouped_mm()")
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (2, 2)])
def test_replicas_have_the_bytes_of_plain_torch(replicas: int, shards: int) -> None:
    """A replica of one rank reads its own memory."""
    names = ("one_expert_at_a_time", "all_at_once", "one_and_all", "one_and_all_in_one_operation", "states_of_stacks")
    scenarios = {name: SCENARIOS[name] for name in names}
    for name, ranks in on_grid(scenarios, replicas, shards).items():
        expected = plainly(scenarios[name], replicas * shards)
        assert all(each == expected for each in ranks), name


# --- what is gathered


def _movement(rank: int) -> dict[str, Any]:
    etp.update_config(prefetch="off")
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Model), group, **OPTIONS)
        experts = model.experts
        figures: dict[str, Any] = {}
        seen = {"bytes": 0, "rounds": 0}

        def note(what: str) -> None:
            report = etp.report(model)
            figures[what] = (report.bytes_gathered - seen["bytes"], report.rounds - seen["rounds"])
            seen.update(bytes=report.bytes_gathered, rounds=report.rounds)

        x = torch.ones(2, HIDDEN)
        out = torch.nn.functional.linear(x, experts.down[1])
        note("one")
        out.sum().backward()  # by the weight only, which is not read for it
        note("its backward")
        torch.nn.functional.linear(x.requires_grad_(), experts.down[1]).sum().backward()
        note("both for its input")
        with torch.no_grad():
            torch.bmm(torch.ones(EXPERTS, 2, WIDTH), experts.down)
        note("all")
        figures["states"] = [each.version for each in experts.down.etp.experts]
        figures["names"] = [each.name for each in experts.down.etp.experts][:2]
        figures["layout"] = str(experts.down.etp.layout)
        figures["torch"] = _torch_error(lambda: experts.down[EXPERTS].sum())
        return figures


def _peaks(rank: int) -> tuple[int, int, int]:
    etp.update_config(prefetch="off")
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Model), group, **OPTIONS)
        for expert in range(EXPERTS):
            torch.nn.functional.linear(torch.ones(2, HIDDEN), model.experts.down[torch.tensor(expert)])
        one = etp.report(model).gathered_peak_bytes
        torch.bmm(torch.ones(EXPERTS, 2, WIDTH), model.experts.down)
        report = etp.report(model)
        return one, report.gathered_peak_bytes, sum(each.shard_bytes for each in report.weights)


def test_one_expert_takes_the_memory_of_one() -> None:
    ranks = launch(_peaks, 2)
    for one, all_of_them, _ in ranks:
        assert one == EXPERT
        assert all_of_them == (1 + EXPERTS) * EXPERT
    assert sum(shards for *_, shards in ranks) == sum(each.numel() * 4 for each in built(Model).parameters())


def _torch_error(call: Any) -> str:
    try:
        call()
    except IndexError as error:
        return str(error)
    return ""


def test_a_use_of_one_expert_gathers_its_bytes_only() -> None:
    for figures in launch(_movement, 2):
        assert figures["one"] == (EXPERT, 0)
        assert figures["its backward"] == (0, 1)
        assert figures["both for its input"] == (2 * EXPERT, 1)
        assert figures["all"] == (EXPERTS * EXPERT, 0)
        assert figures["states"] == [1] * EXPERTS
        assert figures["names"] == ["experts.down[0]", "experts.down[1]"]
        assert figures["layout"].endswith("R,G1[0;16;32]")
        assert "out of bounds" in figures["torch"]


def _rounds(rank: int) -> dict[str, Any]:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Model), group, **OPTIONS)
        before = etp.report(model).rounds
        loss_of(model, rank).backward()
        report = etp.report(model)
        weight = model.experts.down.etp
        return {"rounds": report.rounds - before, "left out": report.left_out, "states": weight.rs_state}


def test_an_expert_that_a_rank_skips_has_no_round_there() -> None:
    first, second = launch(_rounds, 2)
    # Two stacks; the embedding's uses are one round.
    assert (first["rounds"], second["rounds"]) == (2 * SKIPPED + 1, 2 * (SKIPPED + 1) + 1)
    assert first["left out"] == second["left out"] == 2


class _Various(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(3, 16, 8))
        self.places = torch.nn.Parameter(torch.randn(1, 64, 8))
        self.deep = torch.nn.Parameter(torch.randn(2, 3, 16, 8))
        self.several = torch.nn.ParameterList([torch.randn(2, 16, 8)])
        self.pairs = torch.nn.Bilinear(8, 8, 16)
        self.conv = torch.nn.Conv1d(8, 16, 3)


def _recognised(rank: int) -> list[dict[str, bool]]:
    found = []
    with etp.init_group(timeout=30) as group:
        for stacks in (None, lambda name, parameter: name == "pairs.weight"):
            model = etp.shard_module_(_Various(), group, min_elements=256, stacks=stacks)
            weights = {name: each.etp for name, each in model.named_parameters() if hasattr(each, "etp")}
            found.append({name: isinstance(each, etp.Stack) for name, each in weights.items()})
    return found


def test_what_is_a_stack() -> None:
    names = ("experts", "places", "deep", "several.0", "pairs.weight", "conv.weight")
    for by_module, by_name in launch(_recognised, 2):
        assert by_module == {name: name in ("experts", "several.0") for name in names}
        assert by_name == {name: name == "pairs.weight" for name in names}


# --- what travels

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"formats": {".*": "bf16"}},
    "fp8_e4m3": {"formats": {".*": "fp8_e4m3"}},
    "mxfp8": {"formats": {"experts.*": "mxfp8"}},
    "nvfp4": {"formats": {"experts.down": "nvfp4"}},
    "fp8_e4m3 at the first use": {"formats": {"experts.*": "fp8_e4m3"}, "publish": "first_use"},
}


def _of_two_scales() -> Model:
    model = Model()
    with torch.no_grad():
        model.experts.down[1] *= 1e-4
    return model


class _Apart(Model):
    """The same, with a parameter for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(built(_of_two_scales).state_dict())
        for name in ("gate_up", "down"):
            stack = getattr(self.experts, name).detach()
            delattr(self.experts, name)
            setattr(self.experts, name, torch.nn.ParameterList(each.clone() for each in stack))
        self.experts.__class__ = _List


class _List(Experts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen):
            (tokens,) = torch.where(chosen == expert)
            gate, up = torch.nn.functional.linear(x[tokens], self.gate_up[int(expert)]).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            out.index_add_(0, tokens, torch.nn.functional.linear(hidden, self.down[int(expert)]))
        return out


def _in_formats(rank: int, size: int) -> dict[str, dict[str, bytes]]:
    found = {}
    with etp.init_group(timeout=30) as group:
        for name, options in CASES.items():
            run = Run(size, rank, group)
            model = etp.shard_module_(built(_of_two_scales), group, **OPTIONS, **options) if options else None
            model = model or run.sharded(built(_of_two_scales), **OPTIONS)
            run.train(model, adamw(model.parameters()), steps=2, accumulation=4 // size, loss=loss_of)
            found[name] = run.weights(model)
        apart = built(_Apart)
        formats = {r"experts\.(gate_up|down)\.\d": "fp8_e4m3", "emb.weight": "fp8_e4m3"}
        etp.shard_module_(apart, group, formats, **OPTIONS)
        run = Run(size, rank, group)
        run.train(apart, adamw(apart.parameters()), steps=1, accumulation=4 // size, loss=loss_of)
        stacked = etp.shard_module_(built(_of_two_scales), group, {".*": "fp8_e4m3"}, **OPTIONS)
        run = Run(size, rank, group)
        run.train(stacked, adamw(stacked.parameters()), steps=1, accumulation=4 // size, loss=loss_of)
        found["apart"] = {f"{e}": as_bytes(etp.whole(apart.experts.down[e])) for e in range(SKIPPED)}
        down = etp.whole(stacked.experts.down)
        found["stacked"] = {f"{e}": as_bytes(down[e]) for e in range(SKIPPED)}
        return found


@pytest.fixture(scope="module")
def in_formats() -> dict[int, list[dict[str, dict[str, bytes]]]]:
    return {size: launch(functools.partial(_in_formats, size=size), size) for size in (1, 2, 4)}


@pytest.mark.parametrize("name", [*CASES, "apart", "stacked"])
def test_every_number_of_ranks_gives_the_same_bytes(in_formats: dict[int, list[Any]], name: str) -> None:
    expected = in_formats[1][0][name]
    assert all(each[name] == expected for size in (2, 4) for each in in_formats[size])


def test_an_expert_has_an_amax_of_its_own(in_formats: dict[int, list[Any]]) -> None:
    for each in in_formats[2]:
        assert each["stacked"] == each["apart"]
        assert each["fp8_e4m3"] != each["plain"]
        assert each["fp8_e4m3 at the first use"] != each["fp8_e4m3"]  # whose embedding travels in it, too


def _verified(rank: int) -> list[str]:
    with etp.init_group(timeout=30) as group:
        options = [{}, {"formats": {".*": "fp8_e4m3"}}, {"formats": {".*": "mxfp8"}, "stacks": lambda *_: False}]
        return [
            str(
                etp.verify(
                    built(_of_two_scales),
                    2,
                    group=group,
                    batch=lambda number: number,
                    loss=loss_of,
                    optimizer=adamw,
                    max_norm=0.5,
                    **OPTIONS,
                    **each,
                )
            )
            for each in options
        ]


def test_verify_finds_no_difference() -> None:
    for each in launch(_verified, 2):
        assert all("are equal, bit for bit" in text for text in each), each


# --- states


def _saves(rank: int, folder: str) -> dict[str, bytes]:
    with etp.init_group(timeout=30) as group:
        model, run = built(Model), Run(2, rank, group)
        etp.shard_module_(model, group, **OPTIONS)
        optimizer = adamw(model.parameters())
        run.train(model, optimizer, steps=1, accumulation=2, loss=loss_of)
        state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=folder)
        run.train(model, optimizer, steps=1, accumulation=2, loss=loss_of)
        return run.weights(model)


def _loads(rank: int, size: int, folder: str) -> dict[str, bytes]:
    with etp.init_group(timeout=30) as group:
        model, run = built(Model, seed=11), Run(size, rank, group, done=4 // size)
        options = {"stacks": lambda name, parameter: False} if size == 4 else {}
        etp.shard_module_(model, group, **OPTIONS, **options)
        optimizer = adamw(model.parameters())
        state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer, init=True)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        etp.load_optimizer_state_dict(optimizer, state["optimizer"])
        run.train(model, optimizer, steps=1, accumulation=4 // size, loss=loss_of)
        return run.weights(model)


def test_a_checkpoint_goes_on_on_other_numbers_of_ranks(tmp_path: pathlib.Path) -> None:
    """Also where the same parameter is a matrix."""
    expected, _ = launch(functools.partial(_saves, folder=str(tmp_path)), 2)
    for size in (1, 2, 4):
        assert all(
            each == expected for each in launch(functools.partial(_loads, size=size, folder=str(tmp_path)), size)
        )


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)


def _from_meta(rank: int) -> dict[str, bytes]:
    with etp.init_group(timeout=30) as group:
        with torch.device("meta"):
            model = Model()
        torch.manual_seed(5)
        etp.shard_module_(model, group, init=_fill, **OPTIONS)
        assert isinstance(model.experts.down.etp, etp.Stack)
        return Run(2, rank, group).weights(model)


def test_stacks_on_the_meta_device() -> None:
    model = Model()
    torch.manual_seed(5)
    for module in model.modules():
        _fill(module)
    expected = Run(1).weights(model)
    assert all(each == expected for each in launch(_from_meta, 2))


def _by_hand(rank: int) -> list[Any]:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(lambda: Model(Whole)), group, **OPTIONS)
        down = model.experts.down
        room = down.get_wgrad_tensor()
        found: list[Any] = [room.shape, down.get_padded_shard().shape]

        class Given(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                room.copy_(torch.arange(room.numel()).view_as(room))
                down.reduce_wgrad(room)
                return gradient

        Given.apply(torch.ones((), requires_grad=True)).backward()
        whole = etp.whole(down.grad)
        found.append(torch.equal(whole, torch.arange(whole.numel(), dtype=torch.float32).view_as(whole)))
        found.append(torch.linalg.vector_norm(down.grad).item() / torch.linalg.vector_norm(whole).item())
        found.append(torch._foreach_norm([down.grad])[0].item() / torch.linalg.vector_norm(whole).item())
        etp.tag_etp_params_with_names(torch.nn.ModuleDict({"outer": model}))
        found.append(down.etp.experts[EMPTY].name)
        return found


def test_gradients_by_hand_norms_and_names() -> None:
    for shape, padded, equal, norm, foreach, name in launch(_by_hand, 2):
        assert shape == (EXPERTS, WIDTH, HIDDEN) and padded == (EXPERTS, 16, HIDDEN) and equal
        assert norm == pytest.approx(1, rel=1e-6) and foreach == pytest.approx(1, rel=1e-6)
        assert name == f"outer.experts.down[{EMPTY}]"


# --- models of transformers


def _qwen(run: Run, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 12}
    config = transformers.Qwen3MoeConfig(**options, **experts, num_key_value_heads=2, vocab_size=96)
    torch.manual_seed(3)
    model = run.sharded(transformers.Qwen3MoeForCausalLM(config), reduction="sum")
    model.set_experts_implementation(implementation)

    def loss(model: Any, number: int) -> torch.Tensor:
        ids = torch.randint(2, 96, (1, 3), generator=torch.Generator().manual_seed(number))
        value = model(input_ids=ids, labels=ids).loss
        return value if run.group is None else value / run.size

    run.train(model, adamw(model.parameters()), steps=2, loss=loss)
    return run.weights(model)


def qwen_eager(run: Run) -> Any:
    """Few tokens: most experts have none on a rank."""
    return _qwen(run, "eager")


def qwen_grouped(run: Run) -> Any:
    return _qwen(run, "grouped_mm")


def qwen_batched(run: Run) -> Any:
    return _qwen(run, "batched_mm")


QWEN = {each.__name__: each for each in (qwen_eager, qwen_grouped, qwen_batched)}


@pytest.fixture(scope="module", params=[2, 4])
def qwen(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    pytest.importorskip("transformers")
    return request.param, on_ranks(QWEN, request.param)


@pytest.mark.parametrize("name", QWEN)
def test_a_mixture_of_experts_of_transformers(qwen: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = qwen
    expected = plainly(QWEN[name], size)
    assert all(each == expected for each in ranks[name])
