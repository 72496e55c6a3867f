"""ColBERT: vectors of all tokens, in the files of its authors and in PyLate's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import RequestError, UnsupportedModelError
from tests.models.pooling.test_bert import CASES, VARIANTS, config
from tests.models.pooling.worlds import engine, given, hidden, largest_error, prompts, saved
from tests.platform.conftest import save_tokenizer

LENGTHS = (1, 5, 17, 64, 30)
assert ("Bert", "odd") in CASES


def authors(path: Path, variant: str, size: int) -> tuple[transformers.BertModel, torch.Tensor]:
    """(BERT in float64, the projection [size, C]); files as colbert-ir published them."""
    torch.manual_seed(1)
    model = saved(transformers.BertModel(config("Bert", variant, vocab_size=384)), path)
    weight = torch.randn(size, model.config.hidden_size)
    stored = {f"bert.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file({**stored, "linear.weight": weight}, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    sizes = {} if size == 128 else {"colbert_dim": size}
    (path / "config.json").write_text(json.dumps({**raw, "architectures": ["HF_ColBERT"], **sizes}))
    return model, weight.double()


def pylate(path: Path, variant: str, size: int) -> tuple[transformers.BertModel, torch.Tensor]:
    """The same, as PyLate saves them."""
    torch.manual_seed(1)
    model = saved(transformers.BertModel(config("Bert", variant, vocab_size=384)), path)
    weight = torch.randn(size, model.config.hidden_size)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Dense").mkdir()
    dense = {
        "in_features": model.config.hidden_size, "out_features": size, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    (path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors", {"format": "pt"})
    return model, weight.double()


def rows(model: transformers.BertModel, weight: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """[T, size], each of length 1."""
    return torch.nn.functional.normalize(hidden(model, ids) @ weight.T, dim=-1)


@pytest.mark.parametrize("make", [authors, pylate])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("size", [128, 24])
def test_a_vector_of_each_token(tmp_path: Path, make, variant: str, size: int) -> None:
    model, weight = make(tmp_path, variant, size)
    batch = prompts(300, LENGTHS)
    llm = engine(tmp_path)
    found = llm.encode(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], [rows(model, weight, ids) for ids in batch]) < 1e-5
    with pytest.raises(RequestError, match="token_embed"):
        llm.embed(given(batch), use_tqdm=False)


@pytest.mark.parametrize("make", [authors, pylate])
def test_scores_of_pairs(tmp_path: Path, make) -> None:
    """For each of the first text's tokens its largest product with one of the second's, all added up."""
    model, weight = make(tmp_path, "plain", 24)
    save_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), num_gpu_blocks_override=96, debug=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    query, texts = "the star", ["Once upon a time", "a square", "la la la"]
    found = [one.outputs.score for one in llm.score(query, texts, use_tqdm=False)]
    first = rows(model, weight, tokenizer(query).input_ids)
    expected = [(first @ rows(model, weight, tokenizer(text).input_ids).T).amax(1).sum() for text in texts]
    assert largest_error([torch.tensor(found)], [torch.stack(expected)]) < 1e-5


def test_no_classes(tmp_path: Path) -> None:
    authors(tmp_path, "plain", 128)
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        engine(tmp_path, convert="classify")
