"""What vision-language models are built of: their base class, and towers of transformers' with quire's layers."""

from quire.models.vision.base import ImageInputs, MediaInputs, MediaModel, VisionLanguageModel, text_model
from quire.models.vision.towers import TOWERS, FixedGridTower, Projector, TowerLinear, build_tower

__all__ = [
    "TOWERS",
    "FixedGridTower",
    "ImageInputs",
    "MediaInputs",
    "MediaModel",
    "Projector",
    "TowerLinear",
    "VisionLanguageModel",
    "build_tower",
    "text_model",
]
