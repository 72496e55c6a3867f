"""A text model that takes images, videos or sounds: what the engine asks of it beyond a `CausalLM`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from quire import registry
from quire.errors import UnsupportedModelError
from quire.layers import ROTARY_FIELDS
from quire.models.base import CausalLM, refuse
from quire.models.decoder import DecoderForCausalLM
from quire.models.fields import check_fields
from quire.types import ForwardContext, KVCache, MarkerWords, MediaKind, MediaLayout, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of one image, video or sound, as the checkpoint's processor returns them.
MediaInputs = Mapping[str, torch.Tensor]
ImageInputs = MediaInputs


class TakesMedia:
    """What a model says of images, videos and sounds: what each takes in a prompt, and its features.

    image_token_id, video_token_id, audio_token_id: the placeholder of each kind; None: the model takes none.
    mrope: whether tokens turn by three positions, which `rotary_positions` then tells.
    feature_levels: how many further rows come with each feature, one to be added behind each of the first layers
    (arXiv:2406.04334); they stand side by side behind the feature.
    prompt_sees: whether all tokens of a prompt see one another (arXiv:2407.07726).
    feature_width: numbers of a feature, where it is no embedding but the whole of what the model tells of an image
    (`TowerPrompts`).
    images_together: how many images, with inputs of equal shapes and dtypes, are encoded at once on a CPU.
    """

    image_token_id: int | None = None
    video_token_id: int | None = None
    audio_token_id: int | None = None
    mrope = False
    feature_levels: int = 0
    prompt_sees: bool = False
    feature_width: int | None = None
    images_together: int = 1
    # What the family's Hugging Face processor asks of its image processor, whatever that one's own file says.
    processor_settings: Mapping[str, Any] = {}
    # What that processor writes before and behind an image's marker in a text, before the text becomes tokens.
    around_marker: tuple[str, str] = ("", "")
    # The same of a video's marker; it is written in token ids, too, where it is missing there.
    around_video_marker: tuple[str, str] = ("", "")
    # The texts of markers that config.json has no token for. A tokenizer that does not know one gets a token for it.
    marker_words: Mapping[MediaKind, str] = {}
    # Whether `lay_out` writes the special tokens of a text: the tokenizer adds none then.
    lays_out_special: bool = False
    # What an image's marker is called in a text where the tokenizer has none: "{}" stands for its number, from 1. The
    # text between two of them becomes tokens by itself.
    numbered_marker: str = ""

    @property
    def media_token_ids(self) -> dict[MediaKind, int]:
        """The placeholder of each kind that the model takes."""
        ids: dict[MediaKind, int | None] = {
            "image": self.image_token_id, "video": self.video_token_id, "audio": self.audio_token_id,
        }  # fmt: skip
        return {kind: number for kind, number in ids.items() if number is not None}

    @property
    def media_marker_ids(self) -> dict[MediaKind, int]:
        """The token of each kind that stands in a prompt where one is to be put: its placeholder, in most models."""
        return self.media_token_ids

    def media_layout(self, kind: MediaKind, inputs: MediaInputs) -> MediaLayout:
        """What one of this kind takes in a prompt. Raises ValueError when it does not fit the model."""
        layout = {"image": self.image_layout, "video": self.video_layout, "audio": self.audio_layout}[kind]
        return layout(inputs)

    def encode_media(self, kind: MediaKind, inputs: MediaInputs) -> torch.Tensor:
        """The features of one of this kind, as `encode` returns those of an image."""
        encode = {"image": self.encode, "video": self.encode_video, "audio": self.encode_audio}[kind]
        return encode(inputs)

    def image_layout(self, inputs: MediaInputs) -> MediaLayout:
        """What an image takes in a prompt. Raises ValueError when it does not fit the model."""
        raise NotImplementedError

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        """What a video takes in a prompt. Raises ValueError when it does not fit the model."""
        raise ValueError("this model takes no videos")

    def audio_layout(self, inputs: MediaInputs) -> MediaLayout:
        """What a sound takes in a prompt. Raises ValueError when it does not fit the model."""
        raise ValueError("this model takes no audio")

    def given_layout(self, features: int) -> MediaLayout:
        """What an image takes in a prompt of which a caller has computed so many features, and tells nothing more.

        Raises ValueError where that does not say it.
        """
        return MediaLayout(features)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> MediaLayout | None:
        """What an image of `size` (height, width) will take, of which the image processor will make `final`.

        None: that is known only when it is made. Raises ValueError when it will not fit the model.
        """
        return None

    def encode(self, inputs: MediaInputs) -> torch.Tensor:
        """The features of one image: [features, E], to stand in the place of embeddings; with `feature_levels`,
        [features, E * (1 + levels)]."""
        raise NotImplementedError

    def encode_images(self, images: Sequence[ImageInputs]) -> Sequence[torch.Tensor]:
        """What `encode` returns for each of several images, up to `images_together`, to the bit."""
        return [self.encode(image) for image in images]

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        """The features of one video, likewise."""
        raise ValueError("this model takes no videos")

    def encode_audio(self, inputs: MediaInputs) -> torch.Tensor:
        """The features of one sound, likewise."""
        raise ValueError("this model takes no audio")

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        """Called before all else that concerns images: a model that has tokens around features looks them up.

        settings: processor_config.json's, without those of the image processor. encode: a text's token ids by the
        checkpoint's tokenizer, with no special tokens added. Raises CheckpointError where they contradict the model's
        configuration, or lack a token.
        """

    def lay_out(self, pieces: Sequence[str], images: int, words: MarkerWords) -> list[str]:
        """A text as the family's Hugging Face processor writes it before it becomes tokens.

        pieces: the text, cut wherever a user typed a marker's text in a message, which is none. images: of the prompt.
        Returns as many pieces. Raises RequestError.
        """
        written = list(pieces)
        for word, around in ((words.image, self.around_marker), (words.video, self.around_video_marker)):
            if word and any(around):
                written = [piece.replace(word, word.join(around)) for piece in written]
        return written

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        """Raise CheckpointError where the image processor's settings contradict the model's configuration."""

    def check_audio_processor(self, settings: Mapping[str, Any]) -> None:
        """Raise CheckpointError where the feature extractor's settings contradict the model's configuration."""

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """What a prompt's first `length` tokens turn by: [3, length] int64, for models with `mrope`.

        The last of them is asked for as well where the answer begins: one of a text, behind all of the prompt.
        """
        raise NotImplementedError


class MediaModel(TakesMedia, CausalLM):
    """Any model that takes images, videos or sounds."""

    def feature_size(self, embedding_size: int) -> int:
        """Numbers of one placeholder's features."""
        return self.feature_width or embedding_size * (1 + self.feature_levels)


class VisionLanguageModel(MediaModel):
    """A CausalLM that puts features of images, videos or sounds in the place of placeholder tokens.

    A subclass builds `language_model` (by `text_model`) and its own parameters, and defines `image_layout` and
    `encode`; for other kinds, their token ids, and `video_layout` and `encode_video`, `audio_layout` and
    `encode_audio`.

    language_model: the text model, whose parameters' names begin with that.
    """

    language_model: CausalLM
    # Of each kind that the model takes, the field of config.json that has its placeholder.
    token_id_fields: ClassVar[Mapping[MediaKind, str]] = {"image": "image_token_id"}

    # (pattern, new name) for the parts that are not the text model's:
    own_renames: ClassVar[Sequence[tuple[str, str]]] = ()
    # For `published_names`: a part of the model -> its name in each of Hugging Face's namings, as many for every part;
    # {base} is the text model's own name for its base model.
    published_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        for kind, field in self.token_id_fields.items():
            token = getattr(config, field, None)
            if type(token) is not int or not 0 <= token < 2**31:
                refuse(config, field, "it must be a token id, from 0 to 2147483647", token)
            setattr(self, f"{kind}_token_id", token)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        """Checks what is not the text model's, which checks its own part.

        Files of transformers 4.52 to 4.56 have the text model's fields twice, outside too, where nobody reads them.
        """
        text = getattr(config, "text_config", None)
        check_fields(config, {*cls.supported_fields, *(() if text is None else {*vars(text), *ROTARY_FIELDS})})

    def adopt(self, text: CausalLM) -> None:
        """Take the text model, its limits and its loading tables. Raises UnsupportedModelError."""
        if self.feature_levels and type(text).forward is not DecoderForCausalLM.forward:
            raise UnsupportedModelError(
                f"{type(text).__name__} adds nothing behind its layers, and features have {self.feature_levels} levels."
            )
        if self.feature_levels > text.kv_spec.num_layers:
            raise UnsupportedModelError(
                f"config.json: features have {self.feature_levels} levels, and text_config has fewer layers."
            )
        self.language_model = text
        self.kv_spec, self.max_model_len, self.rope_threshold = text.kv_spec, text.max_model_len, text.rope_threshold
        self.narrows = text.narrows and type(self).forward is VisionLanguageModel.forward
        prefix, base = re.escape("language_model."), f"language_model.{_base_name(text)}"
        self.checkpoint_renames = (
            *self.own_renames,
            (r"(?:model\.(?:language|text)_model|language_model\.model)\.(.+)", rf"{base}.\1"),
            (r"lm_head\.(.+)", r"language_model.lm_head.\1"),
            *((prefix + pattern, "language_model." + name) for pattern, name in text.checkpoint_renames),
        )
        self.checkpoint_ignored = tuple(prefix + p for p in text.checkpoint_ignored)
        self.checkpoint_transposed = tuple(prefix + p for p in text.checkpoint_transposed)
        self.tied_weights = {
            f"language_model.{name}": f"language_model.{shared}" for name, shared in text.tied_weights.items()
        }

    def published_names(self, name: str) -> tuple[str, ...]:
        base = _base_name(self.language_model)
        for part, published in self.published_parts.items():
            own = part.format(base=base)
            if name == own or name.startswith(own + "."):
                return tuple(other.format(base=base) + name[len(own) :] for other in published)
        return (name,) * max((len(names) for names in self.published_parts.values()), default=1)

    def is_visual(self, name: str) -> bool:
        return not name.startswith("language_model.")

    def keeps_floats(self, name: str) -> bool:
        return self.language_model.keeps_floats(name.removeprefix("language_model."))

    @property
    def is_tied(self) -> bool:
        return super().is_tied or self.language_model.is_tied

    @property
    def vocab_size(self) -> int:
        return self.language_model.vocab_size

    @property
    def layers_in_order(self) -> nn.ModuleList | None:
        return self.language_model.layers_in_order

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed(input_ids)

    def embed_given(self, rows: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed_given(rows)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.language_model(embeddings, ctx, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.language_model.logits(hidden)


def text_model(config: PretrainedConfig) -> CausalLM:
    """The registry's model for `config.text_config`. Raises UnsupportedModelError.

    Where its architecture is none that is served, its model_type counts, by which transformers goes: SmolVLM's is
    called "VLlama3ForCausalLM" and is a Llama.
    """
    text: Any = config.text_config
    names = list(getattr(text, "architectures", None) or ())[:1]
    if not any(row.architecture in names for row in registry.rows()):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
        names = [name] if name else names
    if not names:
        raise UnsupportedModelError(
            f"config.json: text_config is of model_type {text.model_type!r}, for which no text model is known."
        )
    try:
        model_class = registry.resolve(names)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"config.json: text_config: {error}") from error
    if not issubclass(model_class, CausalLM) or issubclass(model_class, VisionLanguageModel):
        raise UnsupportedModelError(f"config.json: text_config: {names[0]} is no text model.")
    return model_class(text)


def _base_name(text: CausalLM) -> str:
    """What the text model's parameters are called by, beside lm_head: Hugging Face leaves it out inside a LLaVA."""
    names = {name.partition(".")[0] for name, _ in text.named_parameters()} - {"lm_head"}
    if len(names) != 1:
        raise UnsupportedModelError(f"{type(text).__name__} has no one base model, but {sorted(names)}.")
    return names.pop()
