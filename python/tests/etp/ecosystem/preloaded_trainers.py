"""Imports of the fork server for these tests, which take each process seconds otherwise."""

import contextlib
import importlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

for _name in (
    "preloaded",
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "peft",
    "lightning",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
