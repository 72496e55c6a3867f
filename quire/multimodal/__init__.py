"""Images, videos and sounds on their way into prompts: to what towers take, within limits that are checked first."""

from quire.errors import NoRoomError
from quire.multimodal.cache import FeatureCache
from quire.multimodal.embeds import RANGE_ROWS, EmbeddedRows, RowsSpec, open_rows, read_rows
from quire.multimodal.images import Picture, load_picture
from quire.multimodal.kinds import MediaSettings
from quire.multimodal.preprocessor import MediaPreprocessor, Pixels, ProcessedImage
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.prompt import check_count, expand, kind_of, read_media
from quire.multimodal.sources import MediaSource
from quire.multimodal.uuids import MediaByUuid, NamedMedia, named, with_uuids
from quire.multimodal.video_processor import VideoProcessor
from quire.multimodal.videos import VideoHandler

__all__ = [
    "RANGE_ROWS",
    "EmbeddedRows",
    "FeatureCache",
    "ImageProcessor",
    "MediaByUuid",
    "MediaPreprocessor",
    "MediaSettings",
    "MediaSource",
    "NamedMedia",
    "NoRoomError",
    "Picture",
    "Pixels",
    "ProcessedImage",
    "RowsSpec",
    "VideoHandler",
    "VideoProcessor",
    "check_count",
    "expand",
    "kind_of",
    "load_picture",
    "named",
    "open_rows",
    "read_media",
    "read_rows",
    "with_uuids",
]
