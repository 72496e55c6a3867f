"""Images on their way into prompts: from whatever the caller gave to pixels, within limits that are checked first."""

from quire.multimodal.images import Picture, load_picture

__all__ = ["Picture", "load_picture"]
