"""Tiny random models that see or hear: a module for each family, in which a new one is put; here, by architecture."""

from __future__ import annotations

from tests.multimodal.families import (
    audio,
    gemma,
    glm,
    idefics,
    internvl,
    llava,
    onevision,
    paligemma,
    phi3_v,
    pixtral,
    qwen,
)
from tests.multimodal.families.family import Family

FAMILIES: dict[str, Family] = {
    **llava.FAMILIES,
    **qwen.FAMILIES,
    **pixtral.FAMILIES,
    **glm.FAMILIES,
    **idefics.FAMILIES,
    **onevision.FAMILIES,
    **internvl.FAMILIES,
    **gemma.FAMILIES,
    **paligemma.FAMILIES,
    **phi3_v.FAMILIES,
}
HEARING: dict[str, Family] = audio.FAMILIES  # which see nothing
