"""Images on their way into prompts: from whatever the caller gave to pixels, within limits that are checked first."""

from quire.errors import NoRoomError
from quire.multimodal.cache import FeatureCache
from quire.multimodal.images import Picture, load_picture
from quire.multimodal.preprocessor import MediaPreprocessor, Pixels, ProcessedImage
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.prompt import check_count, expand, read_images

__all__ = [
    "FeatureCache",
    "ImageProcessor",
    "MediaPreprocessor",
    "NoRoomError",
    "Picture",
    "Pixels",
    "ProcessedImage",
    "check_count",
    "expand",
    "load_picture",
    "read_images",
]
