"""Names, shapes and dtypes of a checkpoint of Hugging Face, without its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._errors import InvalidArgumentError
from .._tensors.torch import torch_dtype

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def described(folder: Path, *, trust_remote_code: bool = False) -> tuple[Described, str]:
    """What the folder's safetensors have, or, if there are none, what transformers would save of such a model; and
    which of both it is. Raises InvalidArgumentError, or what the file is found to be wrong with."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        tensors = _core.Checkpoint.open(str(folder)).tensors
        return {name: (shape, torch_dtype(dtype)) for name, dtype, shape in tensors}, "as its safetensors have them"
    return _of_config(folder, trust_remote_code), "as transformers would save them"


def _of_config(folder: Path, trust_remote_code: bool) -> Described:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise InvalidArgumentError(
            f"{folder} has no safetensors, and transformers 5, which would tell their names, is missing ({error})"
        ) from error
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InvalidArgumentError(f"{folder}: transformers refuses it: {error}") from error
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied one by its first name
    state = {name: tensor for name, tensor in model.state_dict().items() if name in known}
    saved = revert_weight_conversion(model, state)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
