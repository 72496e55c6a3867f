"""What sentence-transformers' files beside a checkpoint say: which layers stand behind the model, and which texts
before a prompt.

modules.json lists folders: a Transformer, a Pooling (1_Pooling/config.json), and perhaps Dense and Normalize; PyLate's
has a Transformer and a Dense of its own, for the vectors of all tokens (arXiv:2004.12832), which have length 1;
config_sentence_transformers.json has prompts, sentence_bert_config.json the longest text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.checkpoint.files import read_json
from quire.checkpoint.modules import MODULES, listed_modules, module_folder
from quire.errors import CheckpointError, UnsupportedModelError
from quire.pooling_types import DenseSpec, PoolingKind

_TOKENIZER = "tokenizer_config.json"
_PROMPTS = "config_sentence_transformers.json"
_LENGTHS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
            "sentence_camembert_config.json", "sentence_xlm-roberta_config.json", "sentence_xlnet_config.json",
            "sentence_mpnet_config.json", "sentence_albert_config.json")  # fmt: skip
_BESIDE = ("Pooling", "SpladePooling", "Dense", "Normalize")  # modules that have folders
# By the name that a Pooling's config.json sets, and by that of newer versions' `pooling_mode`.
_MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "cls": "cls", "mean": "mean", "lasttoken": "last",
}  # fmt: skip
# The last part of torch's class -> the name by which `quire.layers.activation` knows it.
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
                "Sigmoid": "sigmoid"}  # fmt: skip


class _Served(NamedTuple):
    """What newer versions write of a Transformer. output: of transformers' class; name: of what the module gives."""

    task: str
    output: str
    name: str


_VECTORS = _Served("feature-extraction", "last_hidden_state", "token_embeddings")
_CLASSES = _Served("sequence-classification", "logits", "scores")
_WORDS = _Served("fill-mask", "logits", "token_embeddings")


@dataclass(frozen=True)
class SentenceModules:
    """kind: None where a Pooling is not there. The others are fields of `PoolingSpec`."""

    kind: PoolingKind | None = None
    normalize: bool = False
    dense: tuple[DenseSpec, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False


def is_there(path: Path) -> bool:
    """Whether a checkpoint is one of sentence-transformers'."""
    return (path / MODULES).exists()


def read_modules(path: Path) -> SentenceModules:
    """Read a checkpoint's files. Raises CheckpointError for damaged ones, UnsupportedModelError for what is not
    served."""
    kind: PoolingKind | None = None
    normalize = False
    dense: list[DenseSpec] = []
    modules = listed_modules(path)
    splade = [str(module.get("type")).rpartition(".")[2] for module in modules[1:]] == ["SpladePooling"]
    for module in modules:
        name, folder = str(module.get("type")).rpartition(".")[2], module.get("path")
        if name in ("Transformer", *(("MLMTransformer",) if splade else ())) and not normalize and kind is None:
            if folder not in (None, "", "."):
                raise UnsupportedModelError(
                    f"{path / MODULES}: the Transformer lies in {folder!r}: give that folder as the model; its "
                    "pooling is set by pooler_config then."
                )
            continue
        where = module_folder(path, folder) if name in _BESIDE else path
        if name == "Pooling" and kind is None and not dense and not normalize:
            kind = _pooling(where / "config.json")
        elif name == "SpladePooling" and splade:
            kind = _splade(where / "config.json")
        elif name == "Dense" and not normalize:
            dense.append(_dense(str(folder), read_json(where / "config.json"), where))
        elif name == "Normalize":
            normalize = True
        else:
            raise UnsupportedModelError(
                f"{path / MODULES}: a module of type {module.get('type')!r} at this place is not served; served are a "
                "Transformer, then a Pooling, Dense layers and Normalize; or a SpladePooling alone."
            )
    prompts, default = _prompts(path)
    longest, lower = _lengths(path, _WORDS if splade else _VECTORS)
    if kind is None and any(str(module.get("type")).startswith("pylate.") for module in modules):
        kind, normalize = "all", True
    return SentenceModules(kind, normalize, tuple(dense), prompts, default, longest, lower)


def read_cross_encoder(path: Path) -> SentenceModules:
    """The same of a checkpoint that classifies. Raises as that."""
    if not is_there(path):
        return SentenceModules()
    kinds = [str(module.get("type")).rpartition(".")[2] for module in listed_modules(path)]
    if kinds != ["Transformer"]:
        raise UnsupportedModelError(
            f"{path / MODULES}: lists {', '.join(kinds)}, and behind a model that classifies nothing is served; "
            "convert='embed' makes vectors with it."
        )
    prompts, default = _prompts(path)
    if default is not None and prompts[default]:
        raise UnsupportedModelError(
            f"{path / _PROMPTS}: default_prompt_name={default!r}: pairs with it are not served."
        )
    longest, lower = _lengths(path, _CLASSES)
    return SentenceModules(max_tokens=longest, lower_case=lower)


def activation_named(path: Path) -> Any:
    """The class that a cross-encoder's files name for what is done with a score; None: none."""
    return read_json(path / _PROMPTS).get("activation_fn") if (path / _PROMPTS).exists() else None


def _pooling(file: Path) -> PoolingKind:
    given = read_json(file)
    wanted = given.get("pooling_mode")
    modes = wanted if isinstance(wanted, list) else [wanted] if wanted is not None else [
        name for name, value in given.items() if name.startswith("pooling_mode_") and value is True
    ] or ["mean"]  # fmt: skip
    known = [_MODES[mode] for mode in modes if isinstance(mode, str) and mode in _MODES]
    if len(modes) != 1 or not known:
        raise UnsupportedModelError(f"{file}: pools by {modes}; served is one of {', '.join(sorted(set(_MODES)))}.")
    if given.get("include_prompt", True) is not True:
        raise UnsupportedModelError(f"{file}: include_prompt=false is not served: all tokens of a text are pooled.")
    return known[0]


def _splade(file: Path) -> PoolingKind:
    given = read_json(file)
    for name, known in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if given.get(name, known) != known:
            raise UnsupportedModelError(f"{file}: {name}={given[name]!r} is not served; {known!r} is.")
    return "splade"


def _dense(folder: str, given: Mapping[str, Any], where: Path) -> DenseSpec:
    file = where / "config.json"
    sizes = given.get("in_features"), given.get("out_features")
    if not all(type(size) is int and 0 < size < 1 << 20 for size in sizes):
        raise CheckpointError(f"{file}: in_features and out_features must be whole numbers from 1 to {(1 << 20) - 1}.")
    bias = given.get("bias", True)
    if bias not in (True, False):
        raise CheckpointError(f"{file}: bias={bias!r} must be true or false.")
    for name in ("module_input_name", "module_output_name"):
        if given.get(name) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(f"{file}: {name}={given[name]!r}: a layer of single tokens is not served.")
    if given.get("use_residual") not in (None, False):
        raise UnsupportedModelError(f"{file}: use_residual is not served.")
    path, _, name = str(given.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")
    if name not in _ACTIVATIONS or path.partition(".")[0] != "torch":
        raise UnsupportedModelError(f"{file}: activation_function {given['activation_function']!r} is not served.")
    before, behind = (int(str(size)) for size in sizes)
    return DenseSpec(folder.rstrip("/"), before, behind, bool(bias), _ACTIVATIONS[name])


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    file = path / _PROMPTS
    if not file.exists():
        return {}, None
    given = read_json(file)
    prompts, default = given.get("prompts") or {}, given.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{file}: prompts must be texts by their names.")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(f"{file}: default_prompt_name={default!r} is none of {sorted(prompts)}.")
    return prompts, default


def _lengths(path: Path, served: _Served = _VECTORS) -> tuple[int | None, bool]:
    """(most tokens of a text, whether texts are made lower case)

    Newer versions write the former into the tokenizer's configuration, and the latter into the tokenizer.
    """
    file = next((path / name for name in _LENGTHS if (path / name).exists()), None)
    given = {} if file is None else read_json(file)
    _check_transformer(file, given, served)
    longest = given.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise CheckpointError(f"{file}: max_seq_length={longest!r} must be a whole number from 1, or null.")
    if longest is None and (path / _TOKENIZER).exists():
        found = read_json(path / _TOKENIZER).get("model_max_length")
        longest = found if type(found) is int and found > 0 else None
    return longest, given.get("do_lower_case") is True


def _check_transformer(file: Path | None, given: Mapping[str, Any], served: _Served) -> None:
    """Raise UnsupportedModelError for a Transformer that does something else with a text than what is served."""
    modality = given.get("modality_config")
    text = modality.get("text") if isinstance(modality, Mapping) else None
    found = text if isinstance(text, Mapping) else {}
    known = (
        (given.get("transformer_task"), served.task),
        (given.get("module_output_name"), served.name),
        (found.get("method_output_name"), served.output),
        (found.get("method"), "forward"),
    )
    if any(one not in (None, other) for one, other in known) or (modality is not None and not found):
        raise UnsupportedModelError(
            f"{file}: transformer_task={given.get('transformer_task')!r}, modality_config={modality!r}: served is a "
            f"Transformer for {served.task} whose texts go through its forward, of which its {served.output} are taken."
        )
