"""`--load-format tessera`: a server that starts, restarts or is added waits for the trainer's newest version. It is not
healthy before, and reads no weights from a disk."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ..._errors import InvalidArgumentError
from .._names import job_name

# What else it needs is imported by the processes that load a model, not by each that knows the plugin.


class TesseraModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Takes the fields of InitInfo from `--model-loader-extra-config`, such as '{"engine": "engine0"}'. `timeout`: how
    long it waits for the trainer, and then for a version."""

    def __init__(self, load_config: Any) -> None:
        from ._joined import InitInfo

        super().__init__(load_config)
        given = load_config.model_loader_extra_config or {}
        known = {each.name for each in dataclasses.fields(InitInfo)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InvalidArgumentError(
                f"--model-loader-extra-config: {unknown[0]!r} is not known: give some of {', '.join(sorted(known))}"
            )
        info = InitInfo(**given)
        self._info = dataclasses.replace(
            info, engine=job_name(info.engine, info.pair), trainer=job_name(info.trainer, info.pair)
        )

    def download_model(self, model_config: Any) -> None:
        """Nothing: weights come from the trainer."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        from vllm.config import get_current_vllm_config

        from .._live import Serving
        from ._joined import Joined
        from .worker import loaded

        serving = Serving()
        joined = Joined(model, get_current_vllm_config(), self._info, serving, "loading")
        try:
            joined.meet(is_loading=True)
            joined.learn()
            joined.register(is_loading=True)
            joined.load(self._info.timeout, is_strict=model_config.quantization is None)
        finally:
            joined.close()  # the trainer makes the server join again, once it is up
        loaded(model, serving)
