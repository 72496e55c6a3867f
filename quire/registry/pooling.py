"""What an architecture that generates nothing runs on: a row of its own, or a generator's without its head.

Suffixes are transformers' (*Model, *ForSequenceClassification, *ForTokenClassification) and those of reward models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import UnsupportedModelError
from quire.pooling_types import Convert
from quire.registry.row import IMAGES, Row

# Encoders: every name that their checkpoints have, and the one class that serves all of a family's.
_FAMILIES = {
    "quire.models.bert:BertModel": ("Bert",),
    "quire.models.bert:RobertaModel": ("Roberta", "XLMRoberta", "Camembert"),
    "quire.models.bert:DistilBertModel": ("DistilBert",),
    "quire.models.bert:ElectraModel": ("Electra",),
    "quire.models.albert:AlbertModel": ("Albert",),
    "quire.models.mpnet:MPNetModel": ("MPNet",),
    "quire.models.modernbert:ModernBertModel": ("ModernBert",),
    "quire.models.eurobert:EuroBertModel": ("EuroBert",),
    "quire.models.rotary_encoder:GteModel": ("Gte",),
    "quire.models.rotary_encoder:NomicBertModel": ("NomicBert",),
    "quire.models.rotary_encoder:JinaEmbeddingsV3Model": ("JinaEmbeddingsV3",),
}
_SUFFIXES: dict[str, Convert] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "classify",
    "ForProcessRewardModel": "reward",
    "ForRewardModel": "reward",
    "ForMaskedLM": "embed",
    "Model": "embed",
}
ENCODERS = (
    *(
        Row(stem + suffix, target)
        for target, stems in _FAMILIES.items()
        for stem in stems
        for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    ),
    Row("HF_ColBERT", "quire.models.bert:ColBertModel"),
    Row("CLIPModel", "quire.models.clip:ClipModel", IMAGES),
    Row("CLIPTextModelWithProjection", "quire.models.clip:ClipTextModel"),
    Row("SiglipModel", "quire.models.siglip:SiglipModel", IMAGES),
)
# What generators are called behind the stem, and stems that have another one there.
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_STEMS = {"Gemma3Text": "Gemma3"}


class PoolingRow(NamedTuple):
    """row: of a class that makes nothing but vectors and classes, or of a generator's."""

    row: Row
    convert: Convert


def find_pooling(architectures: Sequence[str], rows: Sequence[Row], convert: str = "auto") -> PoolingRow | None:
    """What config.json's first architecture runs on where it is to make vectors or classes; None: nothing does.

    rows: the generators', and plug-ins', which may take the place of an encoder's. convert: as the setting. Raises
    UnsupportedModelError for what the architecture cannot be converted to.
    """
    name = architectures[0] if architectures else ""
    natural, stem = _natural(name)
    row = next((one for one in (*rows, *ENCODERS) if one.architecture == name), None) or _generator(stem, rows)
    if row is None or not row.target:
        return None
    wanted: Convert = natural or "embed"
    if convert not in ("auto", "none"):
        if convert in ("classify", "reward") and natural not in ("classify", "reward"):
            raise UnsupportedModelError(
                f"convert={convert!r}: {name} has no head that gives classes; take convert='embed', or a checkpoint "
                "whose architecture is named *ForSequenceClassification."
            )
        wanted = convert  # type: ignore[assignment]
    return PoolingRow(row, wanted)


def is_pooling_alone(architectures: Sequence[str], rows: Sequence[Row]) -> bool:
    """Whether no generator is called so, and something that makes vectors or classes is."""
    name = architectures[0] if architectures else ""
    if any(row.architecture == name for row in rows):
        return False
    return find_pooling(architectures, rows) is not None


def _natural(name: str) -> tuple[Convert | None, str]:
    """What an architecture's name says that it does, and the name's beginning."""
    for suffix, convert in _SUFFIXES.items():
        if name.endswith(suffix) and name != suffix:
            return convert, name[: -len(suffix)]
    return None, ""


def _generator(stem: str, rows: Sequence[Row]) -> Row | None:
    names = [_STEMS.get(stem, stem) + ending for ending in _GENERATORS] if stem else []
    return next((row for name in names for row in rows if row.architecture == name), None)
