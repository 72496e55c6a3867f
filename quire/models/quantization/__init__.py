"""Which layers of a model are quantized, how, and of which tensors of the files their rows are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.checkpoint.files import read_json
from quire.checkpoint.gguf.config import METHOD
from quire.errors import UnsupportedModelError
from quire.models.quantization.awq import Awq
from quire.models.quantization.bitsandbytes import BitsAndBytes
from quire.models.quantization.checkpoints import quantizer_of
from quire.models.quantization.compressed_tensors import CompressedTensors
from quire.models.quantization.float8 import Float8
from quire.models.quantization.gptq import Gptq
from quire.models.quantization.mxfp4 import mxfp4
from quire.models.quantization.plan import QuantizationPlan as QuantizationPlan
from quire.models.quantization.plan import QuantizedLayer as QuantizedLayer
from quire.models.quantization.plan import dequantized_part as dequantized_part

if TYPE_CHECKING:
    from quire.checkpoint.files import Checkpoint
    from quire.models.base import CausalLM

# What `quantization` makes of floats when they are loaded; its other values name a method that the files have.
ON_THE_FLY = ("int8", "int4")

# Of a model on the meta device, its files and its quantization_config: what is to be done.
Quantizer = Callable[["CausalLM", "Checkpoint", Mapping[str, Any]], QuantizationPlan]


def _gguf(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
    """Of a GGUF file, quantized or not. The gguf package is imported with it."""
    from quire.models.quantization.gguf import plan_of

    return plan_of(model, checkpoint, settings)


def _kept(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
    """Of a folder that `quire quantize` has written."""
    from quire.models.quantization.kept import plan_of_kept  # which looks at models

    return plan_of_kept(model, checkpoint, settings)


# What config.json calls a method (quantization_config.quant_method) -> what reads it.
METHODS: Mapping[str, Quantizer] = MappingProxyType(
    {
        "awq": quantizer_of(Awq),
        "bitsandbytes": quantizer_of(BitsAndBytes),
        "compressed-tensors": quantizer_of(CompressedTensors),
        "fp8": quantizer_of(Float8),
        "gptq": quantizer_of(Gptq),
        "mxfp4": mxfp4,
        "quire": _kept,
        METHOD: _gguf,
    }
)


# Files of settings that the tools of a method write, where config.json has none: name -> method.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def with_own_file(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json's fields with a quantization_config: its own, its text model's, or that of a file beside it.

    Raises CheckpointError for a file that cannot be read.
    """
    if raw.get("quantization_config"):
        return raw
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config"):
        return {**raw, "quantization_config": text["quantization_config"]}
    for name, method in _OWN_FILES.items():
        if (folder / name).exists():
            return {**raw, "quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return raw


def method_of(raw: Mapping[str, Any]) -> tuple[Quantizer, Mapping[str, Any]] | None:
    """What reads the weights of a config.json's quantization_config, and that; None: it has none.

    Raises UnsupportedModelError for a method that is none of METHODS.
    """
    settings = raw.get("quantization_config") or None
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in METHODS:
        raise UnsupportedModelError(
            f"config.json: quantization_config (quant_method={method!r}): such quantised checkpoints are not served; "
            f"those of {', '.join(sorted(METHODS))} are, and float16, bfloat16 or float32 ones."
        )
    return METHODS[method], settings


def check_wanted(wanted: str | None, raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError where `quantization` asks for something else than the files of this config.json have,
    and they are no floats that it could be made of."""
    settings = raw.get("quantization_config") or None
    own = settings.get("quant_method") if isinstance(settings, dict) else settings
    if wanted is None or (own is not None and wanted == own):
        return
    if wanted not in ON_THE_FLY:
        has = "has no quantization_config" if own is None else f"says quant_method={own!r}"
        raise UnsupportedModelError(
            f"quantization={wanted!r}: config.json {has}. Leave it out: files are read as they are; "
            f"{' and '.join(ON_THE_FLY)} make fewer bits of float16, bfloat16 or float32 weights."
        )
    if own == "gguf":
        raise UnsupportedModelError(
            f"quantization={wanted!r}: a GGUF file's weights are served in the file's own blocks, floats too. Take the "
            "model's GGUF in Q8_0 or Q4_0, or its 16-bit checkpoint."
        )
    if own is not None:
        raise UnsupportedModelError(
            f"quantization={wanted!r}: these weights are quantized already (config.json: quant_method={own!r}), and "
            "rounding them once more would lose more than either does. Leave it out, or take the 16-bit checkpoint."
        )
