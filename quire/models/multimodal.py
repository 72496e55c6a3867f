"""The old name of `quire.models.vision`, for plug-ins that were written for it."""

import warnings

from quire.models.vision import ImageInputs, VisionLanguageModel, text_model

__all__ = ["ImageInputs", "VisionLanguageModel", "text_model"]

warnings.warn("quire.models.multimodal is now quire.models.vision: import from there", DeprecationWarning, stacklevel=2)
