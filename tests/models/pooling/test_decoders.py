"""Decoders whose hidden states are pooled, as embedders and as classifiers, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import PoolingParams
from quire.errors import UnsupportedModelError
from tests.models import rows, tiny
from tests.models.pooling.worlds import change, classes, engine, given, hidden, largest_error, prompts, saved

BARE = PoolingParams(use_activation=False)
GAIN = 1.25  # of weights: larger ones blow up what float32 rounds away
# Some are longer than windows, and than the lengths at which rotations change. Ascending: transformers keeps the
# frequencies of the longest prompt that it has seen.
LENGTHS = (1, 5, 17, 30, 40)
# What a generator is called behind its stem; variants of `tests.models.rows`, whose names are there.
EMBEDDERS: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("gqa", "odd_sizes", "rope_dynamic", "rope_llama3", "mlp_bias", "gelu_tanh"),
    "Qwen2ForCausalLM": ("mqa", "windows", "odd_sizes", "rope_yarn", "tied"),
    "Qwen3ForCausalLM": ("window", "tied", "attention_bias", "yarn", "odd_sizes"),
    "MistralForCausalLM": ("window", "full", "window_of_one", "mqa", "yarn"),
    "GPT2LMHeadModel": ("gelu_new", "n_inner", "inverse_layer_idx", "untied", "one_head"),
    "OPTForCausalLM": ("pre_norm", "post_norm", "no_affine", "no_final_norm", "untied", "one_head"),
    "GemmaForCausalLM": ("mqa", "untied", "attention_bias", "rope"),
    "Gemma2ForCausalLM": ("as_published", "small_caps", "other_layers", "untied"),
    "Gemma3ForCausalLM": ("as_published", "linear_rope", "no_window", "untied"),
    "PhiForCausalLM": ("phi_2", "norms_of_heads", "gqa", "tied", "linear"),
    "Phi3ForCausalLM": ("window", "longrope", "partial", "tied"),
    "BloomForCausalLM": ("bloom", "norms_as_residual", "six_heads", "untied"),
    "GPTNeoXForCausalLM": ("pythia", "sequential", "no_bias", "one_head"),
    "Qwen2MoeForCausalLM": ("as_published", "every_second_layer", "windows", "tied_mqa"),
    "MixtralForCausalLM": ("as_published", "window", "three_of_five", "odd_sizes"),
}
# What a prompt's length changes; of the others, whose tokens `tests.models.rows` compares, one of each is enough.
OF_LENGTHS = ("rope_dynamic", "longrope", "window_of_one", "windows")


def usual(first: str, variants: tuple[str, ...]) -> list[Any]:
    """With each variant; only the first of them, and those of `OF_LENGTHS`, with every change."""
    usually = (variants[0], *OF_LENGTHS)
    return [pytest.param(first, one, marks=[] if one in usually else [pytest.mark.slow]) for one in variants]


CASES = [case for name, variants in EMBEDDERS.items() for case in usual(name, variants)]
# Stem -> (row, variants); transformers has these classes.
CLASSIFIERS = {
    name.removesuffix("ForCausalLM").removesuffix("LMHeadModel"): (name, variants)
    for name, variants in EMBEDDERS.items()
}
OF_TEXTS = [case for stem, (_, variants) in CLASSIFIERS.items() for case in usual(stem, variants)]
OF_TOKENS = [
    case
    for stem, (_, variants) in CLASSIFIERS.items()
    if hasattr(transformers, f"{stem}ForTokenClassification")
    for case in usual(stem, variants[:4])
]


def with_head(stem: str, ending: str, variant: str, **more: Any) -> Any:
    """transformers' model of a stem with a head, every parameter drawn."""
    name, base, table = rows.entry(CLASSIFIERS[stem][0])
    wanted = {**base, **table[variant], **more}
    wanted = {key: dict(value) if isinstance(value, dict) else value for key, value in wanted.items()}
    torch.manual_seed(4)
    attention = {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind = getattr(transformers, stem + ending)
    model = kind._from_config(getattr(transformers, name)(**wanted), **attention).float().eval()
    tiny.randomise(model, GAIN)
    return model


def bare(architecture: str, variant: str, **settings: Any) -> Any:
    """transformers' model of a generator's variant."""
    model = tiny.make(architecture, variant, **settings)
    tiny.randomise(model, GAIN)
    return model


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_vectors(tmp_path: Path, architecture: str, variant: str) -> None:
    oracle = saved(bare(architecture, variant).base_model, tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    states = [hidden(oracle, ids) for ids in batch]
    last = engine(tmp_path, runner="pooling")
    plain = last.embed(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in plain], [one[-1] for one in states]) < 1e-5
    tokens = last.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], states) < 1e-5
    mean = engine(tmp_path, pooler_config={"pooling_type": "MEAN"})
    found = mean.embed(given(batch), use_tqdm=False)
    expected = [one.mean(0) / one.mean(0).norm() for one in states]
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5


@pytest.mark.parametrize("architecture", list(EMBEDDERS))
def test_a_generator_is_converted(tmp_path: Path, architecture: str) -> None:
    """Of the same files tokens are generated and vectors made; the projection is not read for these."""
    variant = EMBEDDERS[architecture][0]
    model = bare(architecture, variant)
    saved(model, tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    found = engine(tmp_path, runner="pooling", convert="embed").embed(given(batch), pooling_params=BARE, use_tqdm=False)
    expected = [hidden(model.base_model, ids)[-1] for ids in batch]
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        engine(tmp_path, convert="classify")


def test_names_without_their_beginning(tmp_path: Path) -> None:
    """As in Qwen3-Embedding's files: of a generator, and saved as the model below it."""
    oracle = saved(bare("Qwen3ForCausalLM", "tied").base_model, tmp_path)
    change(tmp_path, architectures=["Qwen3ForCausalLM"])
    batch = prompts(tiny.VOCAB, LENGTHS)
    found = engine(tmp_path, runner="pooling").embed(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in found], [hidden(oracle, ids)[-1] for ids in batch]) < 1e-5


@pytest.mark.parametrize(("stem", "variant"), OF_TEXTS)
def test_classes_of_texts(tmp_path: Path, stem: str, variant: str) -> None:
    oracle = saved(with_head(stem, "ForSequenceClassification", variant, num_labels=3, pad_token_id=0), tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    llm = engine(tmp_path)
    plain = llm.classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in plain], expected) < 1e-5
    found = llm.classify(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], [one.softmax(0) for one in expected]) < 1e-5


@pytest.mark.parametrize("stem", ["Llama", "Qwen2", "GPT2"])
@pytest.mark.parametrize("padding", [None, 7])
def test_one_number_of_a_text(tmp_path: Path, stem: str, padding: int | None) -> None:
    """A reward, as transformers' classes of one label give it, with and without a token for padding."""
    variant = CLASSIFIERS[stem][1][0]
    model = with_head(stem, "ForSequenceClassification", variant, num_labels=1, pad_token_id=padding)
    oracle = saved(model, tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    batch = [[8 if token == padding else token for token in ids] for ids in batch]
    expected = [classes(oracle, ids) for ids in batch]
    found = engine(tmp_path).classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], expected) < 1e-5
    found = engine(tmp_path).classify(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], [one.sigmoid() for one in expected]) < 1e-5


@pytest.mark.parametrize(("stem", "variant"), OF_TOKENS)
def test_classes_of_tokens(tmp_path: Path, stem: str, variant: str) -> None:
    oracle = saved(with_head(stem, "ForTokenClassification", variant, num_labels=5), tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    found = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_classify", use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], [classes(oracle, ids) for ids in batch]) < 1e-5


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                                          "MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])  # fmt: skip
def test_tokens_that_see_both_ways(tmp_path: Path, architecture: str) -> None:
    """GTE-Qwen2's files say is_causal=false; LLM2Vec's models are such too."""
    for variant in EMBEDDERS[architecture]:
        path = tmp_path / variant
        saved(bare(architecture, variant).base_model, path)
        change(path, is_causal=False)
        oracle = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").double().eval()
        batch = prompts(tiny.VOCAB, LENGTHS)
        states = [hidden(oracle, ids) for ids in batch]
        llm = engine(path, runner="pooling", max_num_batched_tokens=16)
        tokens = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
        assert largest_error([one.outputs.data for one in tokens], states) < 1e-5


@pytest.mark.parametrize("variant", EMBEDDERS["Gemma3ForCausalLM"])
@pytest.mark.parametrize("window", [3, 9, 12])
def test_gemma_3_that_sees_both_ways(tmp_path: Path, variant: str, window: int) -> None:
    """EmbeddingGemma: half of sliding_window lies on either side of a token."""
    settings = {"use_bidirectional_attention": True, "sliding_window": window}
    oracle = saved(bare("Gemma3ForCausalLM", variant, **settings).base_model, tmp_path)
    batch = prompts(tiny.VOCAB, LENGTHS)
    states = [hidden(oracle, ids) for ids in batch]
    tokens = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], states) < 1e-5


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM"])
def test_padding_at_the_end_of_a_text_is_left_out(tmp_path: Path, architecture: str) -> None:
    """Transformers takes the row of the last token that is no padding; of nothing but padding, the first one's."""
    stem = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    config = bare(architecture, EMBEDDERS[architecture][0]).config
    config.pad_token_id, config.num_labels = 0, 3
    oracle = saved(getattr(transformers, f"{stem}ForSequenceClassification")(config), tmp_path)
    batch = [[5, 6, 0], [0, 5, 6, 0, 0], [7, 0, 9], [0, 0], [8]]
    found = engine(tmp_path).classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], [classes(oracle, ids) for ids in batch]) < 1e-5
