"""Images, videos and sounds on their way into prompts: to what towers take, within limits that are checked first."""

from quire.errors import NoRoomError
from quire.multimodal.audio import AudioHandler
from quire.multimodal.audio_processor import AudioProcessor
from quire.multimodal.cache import FeatureCache
from quire.multimodal.embeds import RANGE_ROWS, EmbeddedRows, RowsSpec, open_rows, read_rows
from quire.multimodal.images import Picture, load_picture
from quire.multimodal.kinds import Configurable, MediaSettings
from quire.multimodal.preprocessor import MediaPreprocessor, Pixels, ProcessedImage
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.prompt import check_count, expand, kind_of, read_media
from quire.multimodal.sources import MediaHandler, MediaSource
from quire.multimodal.uuids import MediaByUuid, NamedMedia, named, with_uuids
from quire.multimodal.video_processor import VideoProcessor
from quire.multimodal.videos import VideoHandler

__all__ = [
    "RANGE_ROWS",
    "AudioHandler",
    "AudioProcessor",
    "Configurable",
    "EmbeddedRows",
    "FeatureCache",
    "ImageProcessor",
    "MediaByUuid",
    "MediaHandler",
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
