"""The adapter against each generation of vLLM's interface, as it is recorded: no vLLM is needed."""

import concurrent.futures
import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest
import torch
import vllm_interface
from loaders import LOADERS
from played_vllm import KNOWN, Client, played
from tessera import InvalidArgumentError, UnavailableError, UnimplementedError
from test_learned_maps import tensors, values


@pytest.fixture(params=KNOWN)
def vllm(request, folder):
    with played(request.param, folder) as release:
        release.ours.register()
        yield release


class Trained(torch.nn.Module):
    """A model whose parameters are those of a checkpoint."""

    def __init__(self, checkpoint):
        super().__init__()
        for name, (shape, dtype) in checkpoint.items():
            *path, last = name.split(".")
            module = self
            for each in path:
                if each not in module._modules:
                    module.add_module(each, torch.nn.Module())
                module = module.get_submodule(each)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def become(self, version, checkpoint):
        with torch.no_grad():
            for name, value in values(checkpoint, version).items():
                self.get_parameter(name).copy_(value)


class Pair:
    """A trainer, by vLLM's own interface of one, and an engine with a model of `loaders`."""

    def __init__(self, vllm, name="fused", source=None, **options):
        self.vllm = vllm
        self.make = lambda: LOADERS[name](0, 1)
        loading = self.make()
        self.checkpoint = loading.checkpoint
        self.model = loading.model
        self.trained = Trained(self.checkpoint)
        self.client = Client(vllm.worker(self.model))
        self.source = (source or vllm.base.ModuleSource)(self.trained)
        info = vllm.ours.TesseraTrainerInitInfo(rank=0, world=1, pair=f"played-{vllm.version}-{name}", **options)
        factory = vllm.factory.WeightTransferTrainerFactory
        self.trainer = factory.trainer_init(info, client=self.client, source=self.source)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.trainer.shutdown()
        self.client.worker.play("shutdown")

    def send(self, version):
        self.trained.become(version, self.checkpoint)
        self.trainer.send_weights()

    def holds(self, version):
        model = self.make().model
        model.load_weights(iter(values(self.checkpoint, version).items()))
        expected = tensors(model)
        return all(torch.equal(each, expected[name]) for name, each in tensors(self.model).items())


def test_the_backend_is_registered_once(vllm):
    vllm.ours.register()
    for factory in (vllm.factory.WeightTransferEngineFactory, vllm.factory.WeightTransferTrainerFactory):
        assert list(factory._registry) == ["tessera"]
    worker = vllm.worker(torch.nn.Linear(2, 2))
    assert type(worker.weight_transfer_engine).__name__ == "TesseraWeightTransferEngine"
    assert worker.weight_transfer_engine.vllm_config is worker.vllm_config


@pytest.mark.parametrize(
    ("module", "ours", "theirs"),
    [
        ("worker", "TesseraWeightTransferEngine", "WeightTransferEngine"),
        ("_trainer_engine", "TesseraTrainerEngine", "TrainerWeightTransferEngine"),
    ],
)
def test_our_classes_have_what_the_generation_calls(vllm, module, ours, theirs):
    kind = getattr(importlib.import_module(f"tessera.engines.vllm.{module}"), ours)
    base = getattr(vllm.base, theirs)
    assert issubclass(kind, base) and not kind.__abstractmethods__
    common = [name for name in vars(kind) if callable(getattr(base, name, None)) and not name.startswith("_")]
    assert len(common) >= 3
    for name in common:
        assert list(inspect.signature(getattr(kind, name)).parameters.values()) == [
            each.replace(annotation=mine.annotation)
            for each, mine in zip(
                inspect.signature(getattr(base, name)).parameters.values(),
                inspect.signature(getattr(kind, name)).parameters.values(),
                strict=True,
            )
        ]


def test_what_a_trainer_tells_a_worker_is_parsed(vllm):
    info = vllm.ours.TesseraTrainerInitInfo(rank=3, pair="p", engine="e", timeout=7, delta=True)
    assert isinstance(info, vllm.base.TrainerInitInfo) and info.backend == "tessera"
    worker = vllm.worker(torch.nn.Linear(2, 2))
    parsed = worker.weight_transfer_engine.parse_init_info(info.for_workers())
    assert isinstance(parsed, vllm.base.WeightTransferInitInfo)
    assert (parsed.pair, parsed.trainer, parsed.engine) == ("p", "trainer.p", "e.p")
    assert (parsed.timeout, parsed.delta) == (7, True)
    update = worker.weight_transfer_engine.parse_update_info({"min_version": 3, "timeout": 1, "received": True})
    assert isinstance(update, vllm.base.WeightTransferUpdateInfo) and update.min_version == 3


def test_replicas_are_not_met_by_an_interface_that_hears_only_of_the_first(vllm):
    engine = vllm.worker(torch.nn.Linear(2, 2)).weight_transfer_engine
    engine.vllm_config.parallel_config.data_parallel_index = 1
    info = engine.parse_init_info(vllm.ours.TesseraTrainerInitInfo(rank=0).for_workers())
    with pytest.raises(InvalidArgumentError, match="replica 1 of this engine: .* use tessera.engines.vllm.Trainer"):
        engine.init_transfer_engine(info)


def test_a_trainer_updates_an_engine(vllm):
    with Pair(vllm) as pair:
        assert isinstance(pair.client, vllm.base.VLLMWeightSyncClient)
        for version in (1, 2, 3):
            pair.send(version)
            assert pair.holds(version) and pair.client.version == str(version)
        assert pair.client.calls == ["start", "update", "finish"] * 3
        assert pair.trainer.last_update.ok and pair.trainer.last_update.version == 3


def test_an_update_that_fails_leaves_the_version_and_the_next_works(vllm, monkeypatch):
    with Pair(vllm, "experts") as pair:
        pair.send(1)
        live = pair.client.worker.weight_transfer_engine._live
        with monkeypatch.context() as patch:
            patch.setattr(live, "_swap", lambda done: 1 / 0)
            with pytest.raises(UnavailableError, match=r"version 2 is not served: rank 0: ZeroDivisionError"):
                pair.send(2)
        assert pair.holds(1) and pair.client.version == "1" and pair.trainer.last_update.version == 1
        pair.send(3)
        assert pair.holds(3) and pair.client.version == "3"


@pytest.mark.parametrize("quick", [False, True])
def test_an_update_that_was_interrupted_is_ended_first(vllm, monkeypatch, quick):
    with Pair(vllm) as pair:
        engine = pair.client.worker.weight_transfer_engine
        receive = engine.receive
        if quick:  # it has received before it answers
            monkeypatch.setattr(engine, "receive", lambda info: (receive(info), engine._thread.join()))
        pair.client.start_weight_update()  # of a trainer that has gone
        pair.send(1)
        assert pair.holds(1) and pair.client.calls == ["start", "finish", "start", "update", "finish"]


def test_an_error_of_the_client_is_told(vllm, monkeypatch):
    with Pair(vllm) as pair:
        monkeypatch.setattr(pair.client, "update_weights", lambda info: 1 / 0)
        with pytest.raises(UnavailableError, match=r"the client: ZeroDivisionError"):
            pair.send(1)
        monkeypatch.undo()
        pair.send(2)
        assert pair.holds(2)


def test_a_source_of_ones_own_is_iterated_at_each_send(vllm):
    made = []

    class Source(vllm.base.WeightSource):
        def __init__(self, model):
            self.model = model

        def metas(self):
            return [vllm.base.ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.pairs()]

        def pairs(self):
            return [(name, each.detach().clone()) for name, each in self.model.named_parameters()]

        def iter_full(self):
            made.append(len(self.pairs()))
            yield from self.pairs()

        __iter__ = iter_full
        metadata = property(metas) if vllm.version == "0.33" else metas

    with Pair(vllm, source=Source) as pair:
        for version in (1, 2):
            pair.send(version)
            assert pair.holds(version)
        assert made == [len(pair.checkpoint)] * 3  # once to register


def test_of_whole_tensors_each_rank_keeps_its_share(vllm):
    held = importlib.import_module("tessera.engines.vllm._sources").Held

    class Source(vllm.base.WeightSource):
        def metas(self):
            return [vllm.base.ParamMeta(name, torch.float32, (2,)) for name in "abcde"]

        def iter_full(self):
            yield from ((name, torch.zeros(2)) for name in "abcde")

        def held_names(self):
            return None

        __iter__ = iter_full
        metadata = property(metas) if vllm.version == "0.33" else metas

    assert [list(held(vllm.base, Source(), rank, 2).tensors) for rank in range(2)] == [["a", "c", "e"], ["b", "d"]]
    if vllm.version in ("0.29-0.31", "0.32"):
        Source.held_names = lambda self: ["b", "c"]  # of a pipeline's stage
        assert [list(held(vllm.base, Source(), rank, 2).tensors) for rank in range(2)] == [["b", "c"]] * 2
    module = torch.nn.Linear(2, 2)
    assert held(vllm.base, vllm.base.ModuleSource(module), 0, 2).tensors is module  # DTensors stay as they are


def test_pieces_are_sent_in_the_layout_that_their_metadata_declares(folder):
    with played("0.33", folder) as vllm:
        vllm.ours.register()
        loading = LOADERS["fused"](0, 1)
        worker = vllm.worker(loading.model)
        checkpoint = values(loading.checkpoint, 1)
        columns = {"o": (1, 0)}  # an outer mesh dim of 1 that shards, too

        class Source(vllm.base.WeightSource):
            def __init__(self, rank):
                self.rank = rank

            @property
            def metadata(self):
                return [self.meta(name, each) for name, each in checkpoint.items()]

            def meta(self, name, tensor):
                if name == "norm":
                    return vllm.base.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                dims = columns.get(name, (0,))
                mesh = (1,) * (len(dims) - 1) + (2,)
                placements = tuple(map(vllm.base.Shard, dims))
                return vllm.base.ParamMeta(
                    name, tensor.dtype, tuple(tensor.shape), owners=(0, 1), mesh_shape=mesh, placements=placements
                )

            def iter_local(self):
                for name, tensor in checkpoint.items():
                    pieces = tensor.chunk(2, columns.get(name, (0,))[-1])
                    yield name, tensor if name == "norm" else pieces[self.rank]

        def train(rank):
            info = vllm.ours.TesseraTrainerInitInfo(rank=rank, world=2, pair="played-pieces")
            trainer = vllm.factory.WeightTransferTrainerFactory.trainer_init(
                info, client=Client(worker), source=Source(rank)
            )
            trainer.send_weights()
            return trainer

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            trainers = list(threads.map(train, range(2)))
        expected = LOADERS["fused"](0, 1).model
        expected.load_weights(iter(checkpoint.items()))
        assert all(torch.equal(each, tensors(expected)[name]) for name, each in tensors(loading.model).items())
        assert trainers[0].last_update.ok and trainers[1].last_update is None
        for trainer in trainers:
            trainer.shutdown()
        worker.play("shutdown")


class Refusing(Client):
    """A client that fails where it is told to."""

    failing = ""

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "failing"):
            raise OSError(f"no {name}")
        return object.__getattribute__(self, name)


def test_ranks_raise_what_rank_0_raises(vllm):
    loading = LOADERS["fused"](0, 1)
    model = Trained(loading.checkpoint)
    model.become(1, loading.checkpoint)
    client = Refusing(vllm.worker(loading.model))

    def train(rank):
        info = vllm.ours.TesseraTrainerInitInfo(rank=rank, world=2, pair="played-refused")
        source = vllm.base.ModuleSource(model)
        return vllm.factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:

        def both(work, *arguments):
            calls = [threads.submit(work, *each) for each in zip(*arguments, strict=True)]
            return [call.exception() or call.result() for call in calls]

        client.failing = "init_weight_transfer_engine"
        errors = both(train, range(2))
        assert {(type(error).__name__, str(error)) for error in errors} == {
            ("UnavailableError", "the client: OSError: no init_weight_transfer_engine")
        }
        client.failing = ""
        trainers = both(train, range(2))
        replies = []
        for failing in ("", "update_weights", "", ""):
            client.failing = failing
            replies.append(both(lambda trainer: trainer.send_weights(), trainers))
        assert [str(first or "") for first, _ in replies][::2] == ["", ""] and replies[3] == [None, None]
        assert "no update_weights" in str(replies[1][0])
        heard = [str(second) for _, second in replies if second]
        assert heard == [str(replies[1][0])]
        expected = LOADERS["fused"](0, 1).model
        expected.load_weights(iter(values(loading.checkpoint, 1).items()))
        assert all(torch.equal(each, tensors(expected)[name]) for name, each in tensors(loading.model).items())
        both(lambda trainer: trainer.shutdown(), trainers)
    client.worker.play("shutdown")


def test_without_a_source_or_with_a_client_that_cannot_ask_it_is_refused(vllm):
    trainer_init = vllm.factory.WeightTransferTrainerFactory.trainer_init
    info = vllm.ours.TesseraTrainerInitInfo(rank=0, world=1, pair="refused")
    client = Client(vllm.worker(torch.nn.Linear(2, 2)))
    with pytest.raises(InvalidArgumentError, match=r"source=None: give a WeightSource"):
        trainer_init(info, client=client)
    with pytest.raises(InvalidArgumentError, match=r"client object cannot ask workers what came of an update"):
        trainer_init(info, client=object(), source=vllm.base.ModuleSource(torch.nn.Linear(2, 2)))


def test_a_generation_before_the_known_ones_is_refused_once_it_is_used(folder):
    with played("0.27", folder) as release:
        release.ours.register()  # runs in every process of vLLM, whatever backend is wanted
        with pytest.raises(UnimplementedError, match=r"vLLM 0\.27: WeightTransferEngine wants trainer_send_weights"):
            release.worker(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("def drain_pending", "@abstractmethod\n    def drain_pending"), "WeightTransferEngine wants drain_pending"),
        (("device: torch.device, model", "model"), r"WeightTransferEngine is made of \(config, vllm_config, model\)"),
        (
            ("class WeightTransferUpdateInfo", "class UpdateOfWeights"),
            "weight transfer has no WeightTransferUpdateInfo",
        ),
    ],
)
def test_a_generation_after_the_known_ones_is_refused_by_what_it_wants(folder, change, error):
    with played("0.33", folder, change) as release:
        release.ours.register()
        with pytest.raises(UnimplementedError, match=rf"vLLM 0\.33: .*{error}; 0\.28 to 0\.33 are known"):
            release.worker(torch.nn.Linear(2, 2))


def test_a_trainer_of_another_generation_is_refused(folder):
    change = ("def shutdown(self) -> None: ...\n", "@abstractmethod\n    def another(self): ...\n")
    with (
        played("0.33", folder, change) as release,
        pytest.raises(UnimplementedError, match="TrainerWeightTransferEngine wants another"),
    ):
        _ = release.ours.TesseraTrainerInitInfo


@pytest.mark.parametrize("version", KNOWN)
def test_each_generation_has_the_routes_that_are_called(version):
    routes = vllm_interface.modules(vllm_interface.recorded(version))["routes"]
    for each in ("pause", "resume", "collective_rpc", "init_weight_transfer_engine", "update_weight_version"):
        assert f"router.post('/{each}')" in routes


def test_the_record_of_the_release_that_is_installed_is_true():
    try:
        package = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    version = ".".join(package.version.split(".")[:2])
    if not (vllm_interface.RECORDS / f"{version}.pyi").exists():
        pytest.skip(f"vLLM {version} is not recorded under its own name")
    site = Path(str(package.locate_file("vllm"))).parent
    assert vllm_interface.record(site) == vllm_interface.recorded(version)
