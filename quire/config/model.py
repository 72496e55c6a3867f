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
