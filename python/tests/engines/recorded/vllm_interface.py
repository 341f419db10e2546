"""Interfaces of vLLM releases that are not installed: recorded as signatures, and played by a package that is made of
them.

    python vllm_interface.py SITE_PACKAGES > vllm_interfaces/0.32.pyi      # records what is in there

A record has the signatures, fields and bases that the adapter meets, what constructors keep, and the calls that a
worker makes of its weight transfer engine; nothing else of vLLM. Bodies that a test needs are written there.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

RECORDS = Path(__file__).parent / "vllm_interfaces"
_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload"
# By module: what is recorded of it. "CLASS: NAMES": no more of a class than attributes of these names; "import NAME":
# that it has it from elsewhere.
_WANTED: Mapping[str, Iterable[str]] = {
    f"{_TRANSFER}.base": (
        *("TInitInfo", "TUpdateInfo", "TTrainerInitInfo", "WeightTransferUpdatePayload", "Placement"),
        *("Replicate", "Shard", "ParamMeta", "WeightSource", "ModuleSource"),
        *("WeightTransferInitInfo", "TrainerInitInfo", "WeightTransferUpdateInfo"),
        *("WeightTransferEngine", "VLLMWeightSyncClient", "TrainerWeightTransferEngine"),
    ),
    f"{_TRANSFER}.factory": ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"),
    f"{_TRANSFER}.clients": ("HTTPVLLMWeightSyncClient", "RayVLLMWeightSyncClient"),
    _TRANSFER: (
        *("import ModuleSource", "import WeightTransferEngineFactory", "import WeightTransferTrainerFactory"),
        *("import HTTPVLLMWeightSyncClient", "import RayVLLMWeightSyncClient"),
    ),
    "vllm.config": ("import set_current_vllm_config",),
    "vllm.config.vllm": ("set_current_vllm_config",),
    "vllm.config.parallel": ("ParallelConfig: data_parallel_index data_parallel_size rank world_size",),
    "vllm.distributed.parallel_state": ("GroupCoordinator: cpu_group rank_in_group world_size", "get_world_group"),
    f"{_RELOAD}.layerwise": ("get_layerwise_info", "_get_original_loader"),
    f"{_RELOAD}.meta": ("import restore_layer_refs", "to_meta_tensor", "restore_layer_on_meta"),
    f"{_RELOAD}.sanitize": ("restore_layer_refs",),
    f"{_RELOAD}.types": ("LayerReloadingInfo: restore_metadata",),
    "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
}
_WORKER = "vllm.v1.worker.gpu_worker"
_CALLS = (
    *("load_model", "init_weight_transfer_engine", "_start_weight_update", "update_weights", "finish_weight_update"),
    *("_set_draft_weight_update_target", "shutdown_weight_transfer_engine", "shutdown"),
)
_ROUTES = ("entrypoints/rl/online/api_router.py", "entrypoints/serve/dev/rlhf/api_router.py")
_ROUTES_RPC = "entrypoints/serve/dev/rpc/api_router.py"
_MODULE = "# --- "


def record(site: Path) -> str:
    """Of the vLLM in this folder, which need not be importable."""
    lines: list[str] = []
    for module, wanted in _WANTED.items():
        lines += ["", f"{_MODULE}{module}", *_statements(_tree(site, module), wanted)]
    lines += ["", f"{_MODULE}{_WORKER}", *_worker(_tree(site, _WORKER)), "", f"{_MODULE}routes", *sorted(_routes(site))]
    return "\n".join(lines[1:]) + "\n"


def recorded(version: str) -> str:
    """The record without its heading."""
    text = (RECORDS / f"{version}.pyi").read_text()
    return text[text.index(_MODULE) :]


def modules(text: str) -> dict[str, str]:
    """What a record says of each module."""
    parts = [part.partition("\n") for part in text.split(_MODULE)[1:]]
    return {name: body.strip("\n") + "\n" for name, _, body in parts}


def install(version: str, folder: Path) -> None:
    """Makes a package `vllm` of a record in `folder`, which is to be put on sys.path. Functions do nothing."""
    named = modules(recorded(version))
    del named["routes"], named[_WORKER]
    for module in named:
        for package in itertools.accumulate(module.split(".")[:-1], lambda a, b: f"{a}.{b}"):
            named = {package: "", **named} if package not in named else named
    named["vllm"] = f"__version__ = {version!r}\n"
    for module, text in named.items():
        path = folder.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in named)
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PRELUDE + text)


def calls(version: str, method: str) -> list[ast.stmt]:
    """The calls of the engine that a method of this release's worker makes; none if there is no such method."""
    (worker,) = ast.parse(modules(recorded(version))[_WORKER]).body
    assert isinstance(worker, ast.ClassDef)
    return next((each.body for each in worker.body if isinstance(each, ast.FunctionDef) and each.name == method), [])


_PRELUDE = """\
from __future__ import annotations
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

config = lambda made: made
Field = lambda **options: None

"""


def _tree(site: Path, module: str) -> ast.Module:
    path = site.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _statements(tree: ast.Module, wanted: Iterable[str]) -> Iterator[str]:
    fields = {name: names.split() for name, _, names in (each.partition(":") for each in wanted)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            for each in node.names:
                if f"import {each.name}" in fields:
                    yield f"from {dots}{node.module} import {each.name}"
        elif isinstance(node, ast.ClassDef) and node.name in fields:
            yield from _class(node, fields[node.name])
        elif isinstance(node, ast.FunctionDef) and node.name in fields:
            yield from _function(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in fields:
            yield ast.unparse(node)


def _class(node: ast.ClassDef, fields: list[str]) -> Iterator[str]:
    yield from (f"@{ast.unparse(each)}" for each in node.decorator_list)
    bases = "" if fields else ", ".join(map(ast.unparse, node.bases))
    yield f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    body = [f"    {line}" for each in node.body for line in _member(each, fields)]
    if fields:
        declared = {line.split(":")[0].strip() for line in body}
        body += [f"    {name}: Any" for name in fields if name not in declared and name in _set_somewhere(node)]
    yield from body or ["    ..."]


def _member(node: ast.stmt, fields: list[str]) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and (not fields or ast.unparse(node.target) in fields):
        yield ast.unparse(node)
    elif isinstance(node, ast.FunctionDef):
        is_public = not node.name.startswith("_") or node.name.startswith("__")
        if node.name in fields if fields else is_public:
            yield from _function(node)


def _set_somewhere(node: ast.ClassDef) -> set[str]:
    """Attributes that a method sets."""
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}


def _function(node: ast.FunctionDef) -> Iterator[str]:
    yield from (f"@{ast.unparse(each)}" for each in node.decorator_list)
    head = ast.FunctionDef(node.name, node.args, [ast.Expr(ast.Constant(...))], [], node.returns)
    signature = ast.unparse(ast.fix_missing_locations(head)).replace("\n    ...", "")
    kept = [ast.unparse(each) for each in node.body if _keeps(each)] if node.name == "__init__" else []
    yield signature if kept else f"{signature} ..."
    yield from (f"    {line}" for line in kept)


def _keeps(node: ast.stmt) -> bool:
    """Whether it is `self.NAME = VALUE`."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"


def _worker(tree: ast.Module) -> Iterator[str]:
    yield "class Worker:"
    (worker,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Worker")
    for node in worker.body:
        if isinstance(node, ast.FunctionDef) and node.name in _CALLS:
            yield f"    def {node.name}({ast.unparse(node.args)}):"
            yield from (f"        {line}" for line in _calls(node.body))


def _calls(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What is called of the engine where nothing fails, in order."""
    for node in body:
        if isinstance(node, ast.Expr | ast.Assign):
            if "weight_transfer_engine." in (line := ast.unparse(node)) or "create_engine(" in line:
                yield line
        elif isinstance(node, ast.If | ast.With | ast.Try):
            yield from _calls(node.body)


def _routes(site: Path) -> Iterator[str]:
    found = [site / "vllm" / name for name in _ROUTES if (site / "vllm" / name).exists()]
    for path in (*found[:1], site / "vllm" / _ROUTES_RPC):
        for node in ast.parse(path.read_text()).body:
            for each in getattr(node, "decorator_list", []):
                if isinstance(each, ast.Call) and ast.unparse(each.func).startswith("router."):
                    yield ast.unparse(each)


if __name__ == "__main__":
    print(record(Path(sys.argv[1])), end="")
