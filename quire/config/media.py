"""Images, videos and sounds in prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.config import convert
from quire.config.setting import NOWHERE, Checked, Group, Kind, seconds, setting

_IMAGES = Group.IMAGES
_HOUR = 3600  # seconds


@dataclass(frozen=True)
class MediaConfig(Checked):
    """Images, videos and sounds in prompts: how many, how large, from where, and what may be kept of them."""

    limits: Mapping[str, int] = setting(
        convert.MOST_MEDIA,
        "Most images, videos and sounds of a prompt.",
        more='In a program: {"image": 4, "video": 1}; what it does not name keeps its limit.',
        group=_IMAGES,
        name="limit_mm_per_prompt",
        kind=Kind.LIMITS,
        takes=Mapping[str, int],
        shown="image=64 video=8 audio=8",
        convert=convert.media_limits,
        vllm=True,
    )
    prompt_embeds: bool = setting(
        False,
        "Whether prompts may be embeddings.",
        more='In a program: {"prompt_embeds": a tensor [tokens, size of an embedding]}; over HTTP, in '
        "`/v1/completions`, base64 of the file that torch.save writes of it.",
        group=_IMAGES,
        name="enable_prompt_embeds",
        vllm=True,
    )
    processor_settings: Mapping[str, object] = setting(
        {},
        "Settings for the image processor.",
        more="On top of the checkpoint's own.",
        group=_IMAGES,
        name="mm_processor_kwargs",
        vllm=True,
    )
    io_settings: Mapping[str, Mapping[str, object]] = setting(
        {},
        'How many frames of a video are taken: {"video": {"num_frames": 32}} or {"video": {"fps": 2}}.',
        more="A request's `mm_processor_kwargs` outweigh it; -1 takes all frames.",
        group=_IMAGES,
        name="media_io_kwargs",
        kind=Kind.OBJECT,
        convert=convert.media_io,
        vllm=True,
    )
    allowed_local_media_path: str | None = setting(
        None,
        "The folder that file: URLs may read.",
        more="None refuses them.",
        group=_IMAGES,
        metavar="FOLDER",
        convert=convert.folder,
        vllm=True,
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "A host that image URLs may name.",
        more='"host" or "host:port", for http: and https:; without one, both are refused.',
        group=_IMAGES,
        metavar="HOST",
        takes=Sequence[str],
        convert=convert.hosts,
        vllm=True,
    )
    media_fetch_timeout: float = seconds(
        10.0, "For one image's URL.", more="Its redirects included.", group=_IMAGES, above=0, at_most=_HOUR
    )
    max_image_bytes: int = setting(
        20_000_000, "Most bytes of an image file.", group=_IMAGES, kind=Kind.SIZE, at_least=1
    )
    max_image_pixels: int = setting(50_000_000, "Most pixels of an image.", group=_IMAGES, kind=Kind.SIZE, at_least=1)
    max_image_seconds: float = seconds(10.0, "Most CPU time to decode an image.", group=_IMAGES, above=0, at_most=_HOUR)
    max_video_bytes: int = setting(
        100_000_000, "Most bytes of a video file.", group=_IMAGES, kind=Kind.SIZE, at_least=1
    )
    max_video_duration: float = seconds(
        _HOUR, "Longest video that is taken.", group=_IMAGES, above=0, at_most=24 * _HOUR
    )
    max_video_frames: int = setting(
        768, "Most frames of a video that a model is shown.", group=_IMAGES, kind=Kind.SIZE, at_least=1
    )
    max_video_pixels: int = setting(
        100_000_000,
        "Most pixels of a video, as the model is shown it.",
        more="Of all frames together, each in the size that the video processor gives it.",
        group=_IMAGES,
        kind=Kind.SIZE,
        at_least=1,
    )
    max_video_seconds: float = seconds(30.0, "Most CPU time to decode a video.", group=_IMAGES, above=0, at_most=_HOUR)
    max_audio_bytes: int = setting(
        25_000_000, "Most bytes of a file of sound.", group=_IMAGES, kind=Kind.SIZE, at_least=1
    )
    max_audio_duration: float = seconds(
        600.0, "Longest sound that is taken.", more="A model may hear less.", group=_IMAGES, above=0, at_most=24 * _HOUR
    )
    max_audio_seconds: float = seconds(10.0, "Most CPU time to decode a sound.", group=_IMAGES, above=0, at_most=_HOUR)
    cache_bytes: int = setting(
        512 << 20,
        "For images and their features.",
        more="A quarter for processed pixels that wait to be encoded, the rest for the features of encoded images.",
        group=_IMAGES,
        name="media_cache_bytes",
        kind=Kind.SIZE,
        at_least=1,
    )
    file_bytes: int = setting(
        1 << 30,
        "For files behind URLs, from when they are fetched until their requests end.",
        more="While they fill it, no further one is fetched, and requests wait.",
        group=_IMAGES,
        name="media_file_bytes",
        kind=Kind.SIZE,
        at_least=1,
    )
    workers: int | None = setting(
        None,
        "Threads that prepare images; None takes as many as there are cores, at most 4.",
        group=_IMAGES,
        doors=NOWHERE,
        at_least=1,
    )

    def most(self, kind: str) -> int:
        """How many of a kind a prompt may have."""
        return self.limits[kind]

    def most_bytes(self, kind: str) -> int:
        """Of a file of a kind."""
        return int(getattr(self, f"max_{kind}_bytes"))

    @property
    def most_file_bytes(self) -> int:
        """Of fetched files; those that are kept by their uuids, which have a limit of their own, are among them."""
        return self.file_bytes + self.pixel_bytes

    @property
    def pixel_bytes(self) -> int:
        """The share of pixels that wait."""
        return self.cache_bytes // 4

    @property
    def feature_bytes(self) -> int:
        """The share of features."""
        return self.cache_bytes - self.pixel_bytes
