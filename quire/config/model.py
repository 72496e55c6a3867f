"""What to load, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import convert
from quire.config.setting import LLM_ONLY, Checked, Kind, setting
from quire.errors import QuireError


def _check_token(token: Any) -> None:
    if not isinstance(token, (bool, str)):
        raise QuireError("hf_token: must be a text, or True for the one that is stored.")  # which is not shown


def _check_overrides(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise QuireError("hf_overrides: must be a dict of fields of config.json; no code is taken.")


_ON_THE_FLY = ("int8", "int4")
# Methods that files may have, by vLLM's names.
_OF_FILES = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4", "quire")
# Why the others of vLLM's are not taken.
_ANOTHER_KERNEL = "it names a kernel of vLLM's; {} names the same weights"
_ON_LOAD = "nothing is made in that form while weights are loaded; int8 and int4 are"
_NOT_READ = "weights in that form are not read; int8 and int4 are made of 16-bit ones"
_OTHERS = {
    "awq_marlin": _ANOTHER_KERNEL.format("awq"), "cpu_awq": _ANOTHER_KERNEL.format("awq"),
    "gptq_marlin": _ANOTHER_KERNEL.format("gptq"), "gptq_bitblas": _ANOTHER_KERNEL.format("gptq"),
    "moe_wna16": _ANOTHER_KERNEL.format("awq or gptq"),
    **dict.fromkeys(("deepspeedfp", "experts_int8", "ptpc_fp8", "rtn", "tpu_int8"), _ON_LOAD),
    **dict.fromkeys(
        ("aqlm", "auto-round", "bitblas", "fbgemm_fp8", "fp_quant", "hqq", "inc", "ipex", "marlin", "modelopt",
         "modelopt_fp4", "neuron_quant", "petit_nvfp4", "qqq", "quark", "squeezellm", "torchao"), _NOT_READ),
}  # fmt: skip


def _check_quantization(name: Any) -> None:
    if isinstance(name, str) and name in _OTHERS:
        raise QuireError(f"quantization={name!r}: {_OTHERS[name]}.")


def _check_pooler(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise QuireError("pooler_config: must be a dict, such as {'pooling_type': 'MEAN'}.")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The checkpoint, the tokenizer, and what computes."""

    model: str | None = setting(
        None, "A directory or a hub id; the bundled model if there is none.", convert=convert.text, vllm=True
    )
    tokenizer: str | None = setting(None, "Where the tokenizer is, if not with the model.", vllm=True)
    revision: str | None = setting(None, "The hub's branch, tag or commit.", more="It reaches every file.", vllm=True)
    tokenizer_revision: str | None = setting(None, "The same, of the tokenizer.", vllm=True)
    dtype: str = setting(
        "auto", "auto (the checkpoint's), bfloat16, float16 or float32.", convert=convert.dtype, vllm=True
    )
    quantization: str | None = setting(
        None,
        "int8 or int4: weights in fewer bits, made of floats while they are loaded.",
        more="Groups of 32 numbers have one scale; embeddings and the projection to the vocabulary have 8 bits in "
        "either. Files that are quantized already are read as they are; a method's name (awq, gptq) is taken where "
        "config.json has that method. See docs/quantization.md.",
        choices=(*_ON_THE_FLY, *_OF_FILES),
        check=_check_quantization,
        flags=("-q",),
        vllm=True,
    )
    load_format: str = setting(
        "auto",
        "safetensors; pt, torch's .bin files; or the first of these that is there.",
        more="torch's are read in a process of their own.",
        choices=("auto", "safetensors", "pt"),
        vllm=True,
    )
    model_impl: str = setting(
        "auto",
        "Whose modules run the model: quire's, or transformers' with quire's attention and layers in them.",
        more="auto: quire's where the registry has a row for the architecture, else transformers'. quire: its rows "
        "alone, as vllm is, which vLLM calls its own. transformers: its module for every text model. The log says "
        "what is exact by which means; see docs/models.md.",
        choices=("auto", "quire", "transformers", "vllm"),
        vllm=True,
    )
    runner: str = setting(
        "auto",
        "Whether the model generates text, or makes vectors, classes and scores (pooling).",
        more="auto: pooling for architectures without a projection to the vocabulary, and for checkpoints of "
        "sentence-transformers; else generate. See docs/embeddings.md.",
        choices=("auto", "generate", "pooling"),
        vllm=True,
    )
    conversion: str = setting(
        "auto",
        "What a model is made to do under the pooling runner: embed, classify or reward.",
        more="auto, none: what its architecture is named for; embed for generators.",
        name="convert",
        choices=("auto", "none", "embed", "classify", "reward"),
        vllm=True,
    )
    pooler_config: Mapping[str, object] = setting(
        {},
        'How hidden states are pooled: {"pooling_type": "MEAN", "normalize": true}.',
        more="Where it is left out, what the checkpoint's files say; see docs/embeddings.md.",
        kind=Kind.OBJECT,
        convert=convert.fields_given,
        check=_check_pooler,
        vllm=True,
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda or cuda:1.",
        more="auto: a GPU where there is one that the kernels were built for, else the CPU.",
        vllm=True,
    )
    exact_products: bool = setting(
        True,
        "On a GPU: bits that do not depend on the batch (the default), or cuBLAS.",
        more="cuBLAS is faster for many tokens, and a request's last bits then depend on what shares its steps. A CPU "
        "is always exact.",
    )
    max_model_len: int | None = setting(
        None,
        "Most tokens of prompt and answer.",
        kind=Kind.SIZE,
        at_least=1,
        convert=convert.length,
        shown="the model's",
        vllm=True,
    )
    skip_tokenizer_init: bool = setting(
        False,
        "Load no tokenizer: prompts must be token ids, and outputs have no text.",
        doors=LLM_ONLY,
        vllm=True,
    )
    enforce_eager: bool = setting(
        False,
        "Never replay recorded steps.",
        more="Each runs through the model's Python, which helps to debug a model. Else a step in which each sequence "
        "has one token is recorded and replayed.",
        vllm=True,
    )
    download_dir: str | None = setting(
        None,
        "Where the hub's files are kept.",
        more="None: where huggingface_hub keeps them.",
        metavar="FOLDER",
        vllm=True,
    )
    hf_token: bool | str | None = setting(
        None,
        "For the hub; without a value: the one that is stored.",
        more="In a program: True takes the one that is stored, False none; None: as huggingface_hub finds one.",
        metavar="TOKEN",
        secret=True,
        takes=bool | str,
        convert=convert.token,
        check=_check_token,
        vllm=True,
    )
    hf_overrides: Mapping[str, object] = setting(
        {},
        "Fields of config.json that are to have other values.",
        more="Of an object in it: those of its fields that are named.",
        check=_check_overrides,
        vllm=True,
    )
    trust_remote_code: bool = setting(
        False,
        "No code that comes with a checkpoint is run; see docs/from-vllm.md.",
        more="A model that needs its own code is refused.",
        vllm=True,
    )
