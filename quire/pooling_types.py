"""What is made of a prompt's hidden states in the place of tokens, as rooms tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

# What a model was made to do, or is converted to.
Convert = Literal["embed", "classify", "reward"]
CONVERTS: tuple[Convert, ...] = get_args(Convert)
# Which hidden states: the last token's, the first one's, the mean of all; all, one by one; or those of tokens that end
# a step of reasoning. "splade": of what all tokens say of each word of the vocabulary the largest x, as
# log(1 + max(0, x)).
PoolingKind = Literal["last", "cls", "mean", "all", "step", "splade"]
# What a request asks for; `token_` is one row a token.
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
# What is done with a row in the end.
Activation = Literal["none", "normalize", "softmax", "sigmoid"]


class DenseSpec(NamedTuple):
    """A layer that sentence-transformers puts behind the pooled vector. folder: of its file, beside the model."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


class TowerPrompts(NamedTuple):
    """What a prompt is to a model with a tower for texts, and perhaps one for images: a text, or an image.

    image: the placeholder that an image's prompt consists of; None: images are not taken. end: the token whose row is
    a text's vector, the first of these where it has several; "highest": of all of a text's tokens, the one with the
    highest number; None: the last token, whatever it is. length: tokens that a text is padded to, and padding, with
    which token, unless the tokenizer has one; 0: it is not.
    """

    image: int | None = None
    end: int | Literal["highest"] | None = None
    length: int = 0
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What a model that generates nothing makes of a prompt.

    kind: the rows of the tasks that give one vector; token_kind: of those that give one a token. activation: the
    model's own, which a request may leave out. width: numbers of a row. dimensions: a row may be cut to these
    (arXiv:2205.13147); (): to any number; None: it may not. labels: names of a row's numbers, where they are classes.
    token_types: whether the second of two texts is told from the first. bidirectional: whether all tokens of a prompt
    see one another. step_token: the one that ends a step; labels_returned: the columns that rows keep; (): all.
    dense: layers behind the pooled vector. prompts: texts to be put before a prompt, by name; default_prompt: the name
    of the one that is put there unasked. max_tokens: of a prompt, where the files name fewer than the model has
    positions. lower_case: texts are made lower case before they become tokens. headless: the files have no head, and
    each request needs an adapter that brings one. trailing_padding: the token that is left out at the end of a prompt
    whose last token's row is told. towers: of models with a tower for texts, whose images are prompts of their own.
    """

    convert: Convert
    kind: PoolingKind
    token_kind: PoolingKind = "all"
    activation: Activation = "none"
    width: int = 0
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    token_types: bool = False
    bidirectional: bool = False
    step_token: int | None = None
    labels_returned: tuple[int, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    headless: bool = False
    trailing_padding: int | None = None
    towers: TowerPrompts | None = None

    @property
    def has_many_rows(self) -> bool:
        """Whether a prompt has a row for each of its tokens, or steps, and none for all of it."""
        return self.kind in ("all", "step")

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What may be asked of the model."""
        if self.towers is not None or self.kind == "splade":
            return ("embed",)
        if self.has_many_rows:
            return ("token_embed",) if self.convert == "embed" else ("token_classify",)
        if self.convert == "embed":
            return ("embed", "token_embed")
        if self.convert == "reward":
            return ("token_classify", "classify")
        return ("classify", *(("score",) if self.is_cross_encoder else ()), "token_classify")

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it has one number for a pair of texts."""
        return self.convert == "classify" and len(self.labels) == 1 and not self.has_many_rows


class PoolingInput(NamedTuple):
    """What one request asks for, as plans say it. dimensions: numbers that a row is cut to; 0: it is not.

    second: the position of the second text's first token, where token types are told apart; 0: there is none.
    """

    kind: PoolingKind
    activation: Activation = "none"
    dimensions: int = 0
    second: int = 0

    @property
    def reads_all(self) -> bool:
        """Whether the hidden state of every token counts, so that none may come from the prefix cache."""
        return self.kind != "last"
