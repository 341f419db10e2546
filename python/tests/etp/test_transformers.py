"""Models of transformers, from configurations: training, generation and saving are those of the unsharded model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_models import Run, adamw, as_bytes, on_ranks, plainly
from tessera import etp

transformers = pytest.importorskip("transformers")

WORDS = 128


def gpt2() -> Any:
    """Conv1D, and a tied head."""
    options = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**options, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1)
    )


def llama() -> Any:
    options = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**options, num_key_value_heads=2, vocab_size=WORDS, tie_word_embeddings=True)
    )


def bert() -> Any:
    options = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**options, vocab_size=WORDS, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


def _loss(model: Any, number: int) -> torch.Tensor:
    ids = torch.randint(2, WORDS, (2, 10), generator=torch.Generator().manual_seed(number))
    return model(input_ids=ids, labels=ids).loss


def _life(run: Run, kind: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    model = run.sharded(kind())
    run.train(model, adamw(model.parameters()), loss=_loss)
    found: list[Any] = [run.weights(model)]
    model.eval()
    ids = torch.arange(2, 8).reshape(1, 6)
    if model.can_generate():
        found.append(model.generate(ids, max_new_tokens=5, do_sample=False).tolist())
    else:
        with torch.no_grad():
            found.append(as_bytes(model(ids).logits))
    if run.group is None:
        return found
    with tempfile.TemporaryDirectory() as folder, etp.summon(model):
        model.save_pretrained(folder)  # rank 0 alone writes
        if run.rank == 0:
            saved = type(model).from_pretrained(folder)
            assert {name: as_bytes(each) for name, each in saved.named_parameters()} == found[0]
    return found


def train_gpt2(run: Run) -> Any:
    return _life(run, gpt2)


def train_llama(run: Run) -> Any:
    return _life(run, llama)


def train_bert(run: Run) -> Any:
    return _life(run, bert)


SCENARIOS = {each.__name__: each for each in (train_gpt2, train_llama, train_bert)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_ranks(SCENARIOS, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_of_transformers(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 2)
    assert all(each == expected for each in found[name])
