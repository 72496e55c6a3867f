"""A message that is a text or an image, for models that make a vector of one of these: they have no chat template."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.multimodal.sources import MediaSource
from quire.platform.inputs.chat_messages import check_messages


def prompt_alone(messages: Any, takes_images: bool) -> dict[str, Any]:
    """The prompt of OpenAI-shaped messages: one message, of one text (its parts go in lines of their own) or one image.

    Raises RequestError.
    """
    (message, *others), images = check_messages(messages, takes_images)
    if others:
        raise RequestError(
            f"messages: this model makes a vector of a text or of an image: give one message, not {1 + len(others)}."
        )
    texts = [part for part in message["content"] or () if isinstance(part, str)]
    if images and (texts or len(images) > 1):
        beside = f"{len(images)} images" if len(images) > 1 else "an image"
        raise RequestError(
            "messages[0].content: this model makes a vector of a text or of an image, and the message has "
            f"{beside}{' and a text' if texts else ''}: ask for each by itself."
        )
    if images:
        (image,) = images
        source = image.source if isinstance(image, MediaSource) else image
        return {"prompt": "", "multi_modal_data": {"image": [source]}}
    if not texts:
        raise RequestError("messages[0].content is empty; it must have a text or an image.")
    return {"prompt": "\n".join(texts)}
