"""The demo's last stage: the joined model goes on with answers that have a shape, JSON and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random

import joint
import torch
from calls import Shaped, call_chat, plain_chat
from eyes import VisionConfig, pixels
from json_answers import dense_chat, json_chat, shaped_chat
from picture_chats import IMAGE, training_picture
from reading import END, Batch, Encoded, Reading, by_length, padded
from stage import Pace, Stage
from tokenizers import AddedToken
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerBase

TOOL = "<|tool|>"  # the role of a tool's result
TAGS = ("<tool_call>", "</tool_call>")  # around a call; part of the text, as Hermes models have them


@dataclass(frozen=True)
class Round:
    """Steps of one kind."""

    seed: int
    pace: Pace
    documents: int  # of the stages before, per step
    pictures: int  # likewise, each with a conversation
    calls: int  # conversations with tools, per step
    answers: int  # with answers as JSON
    shown: int  # likewise, about a picture
    plain: float = 0.0  # the share of the tools that bear their usual names
    frame_weight: float = 0.25  # of the loss on what follows from an answer's shape
    dense: int = 0  # conversations with many calls, and as many with many answers as JSON
    parts: int = 4  # batches of the conversations that are new
    stop: int | None = None  # the next round begins after so many steps


# First answers of every shape with tools of every name. To tell which tool and which word is meant takes more of them:
# so then more conversations with fewer tools, and then many short ones. The last two bring the stories back.
ROUNDS = (
    Round(2027, Pace(600, 1.5e-3, warmup=40), documents=8, pictures=6, calls=10, answers=6, shown=4, stop=300),
    Round(
        2028,
        Pace(650, 1.5e-3, warmup=30),
        documents=8,
        pictures=4,
        calls=14,
        answers=5,
        shown=2,
        plain=0.65,
        frame_weight=0.4,
    ),
    Round(
        2029,
        Pace(520, 1.2e-3, warmup=20),
        documents=8,
        pictures=4,
        calls=2,
        answers=1,
        shown=1,
        plain=0.3,
        frame_weight=0.3,
        dense=7,
    ),
    Round(
        2030,
        Pace(900, 1.2e-3, warmup=30),
        documents=14,
        pictures=8,
        calls=5,
        answers=1,
        shown=1,
        plain=0.2,
        frame_weight=0.3,
        dense=7,
    ),
    Round(
        2031,
        Pace(260, 9e-4, warmup=20),
        documents=24,
        pictures=6,
        calls=4,
        answers=1,
        shown=1,
        plain=0.2,
        frame_weight=0.3,
        dense=4,
    ),
)


def add_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """The role and the tags behind all other tokens; and the template that writes them."""
    tokenizer.add_special_tokens({"additional_special_tokens": [TOOL]}, replace_extra_special_tokens=False)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = template


@torch.no_grad()
def add_rows(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
    """Embeddings of the added tokens: the role begins as the user's, the tags as the mean of all."""
    known = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table = model.get_input_embeddings().weight
    table[known:] = table[:known].mean(0)
    table[tokenizer.convert_tokens_to_ids(TOOL)] = table[tokenizer.convert_tokens_to_ids("<|user|>")]


def lessons(
    number: int,
    one: Round,
    reading: Reading,
    eyes: VisionConfig,
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
) -> Stage:
    """A round, which trains the text model and the projector, and leaves the eyes as they are."""
    for parameter in model.model.vision_tower.parameters():
        parameter.requires_grad = False
    before = joint.Joint(one.seed, one.pace, one.documents, one.pictures)
    whole = joint.lessons(before, reading, eyes, model, tokenizer)
    image = tokenizer.convert_tokens_to_ids(IMAGE)

    def shown(rng: Random) -> tuple[Encoded, torch.Tensor]:
        picture = training_picture(rng)
        ids, weights = encode(Shaped(shaped_chat(rng, picture.scene, IMAGE, most=3)), tokenizer, one.frame_weight)
        at = ids.index(image)
        ids[at : at + 1], weights[at : at + 1] = [image] * eyes.tokens, [0.0] * eyes.tokens
        return (ids, weights), pixels(picture.image, eyes)

    def batches(step: int) -> list[Batch | joint.Shown]:
        rng = Random(f"calling {one.seed} {step}")
        texts = [call_chat(rng, one.plain) for _ in range(one.calls)]
        texts += [Shaped(json_chat(rng)) for _ in range(one.answers)]
        texts += [plain_chat(rng, dense=True) for _ in range(one.dense)]
        texts += [Shaped(dense_chat(rng)) for _ in range(one.dense)]
        encoded = [encode(text, tokenizer, one.frame_weight) for text in texts]
        seen = [shown(rng) for _ in range(one.shown)]
        pictures = joint.Shown(
            padded([text for text, _ in seen], tokenizer.pad_token_id), torch.stack([values for _, values in seen])
        )
        made = [*by_length(encoded, one.parts, tokenizer), *whole.batches(step), pictures]
        return [batch for batch in made if batch.weight()]

    recipe = {"calling": asdict(one), "reading": asdict(reading), "eyes": asdict(eyes)}
    return Stage(f"calling-{number}", recipe, one.pace, model, batches, whole.loss, whole.weight, one.stop)


def encode(shaped: Shaped, tokenizer: PreTrainedTokenizerBase, frame: float) -> Encoded:
    """A conversation's tokens, exactly as they are served, and the weight of the loss on each: nothing on what users
    and tools say, and little on what follows from the shape of an answer, or nothing where its shape is given."""
    text = tokenizer.apply_chat_template(shaped.messages, tools=list(shaped.tools) or None, tokenize=False)
    counts = [0.0] * len(text)
    place = 0
    for message in shaped.messages:
        if message["role"] != "assistant":
            continue
        start = text.index("<|assistant|>", place) + len("<|assistant|>")
        place = text.index(END, start) + len(END)
        _weigh(counts, text, start, place, bool(message.get("given")), frame)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    weights = [max(counts[first:last], default=0.0) for first, last in encoded["offset_mapping"]]
    return encoded["input_ids"], weights


def _weigh(counts: list[float], text: str, start: int, stop: int, given: bool, frame: float) -> None:
    """Writes the weights of the characters of an answer; it ends with ``END``."""
    answer = text[start : stop - len(END)]
    if not answer.startswith(("{", "[", TAGS[0])):
        counts[start:stop] = [1.0] * (stop - start)
        return
    counts[start:stop] = [0.0 if given else frame] * (stop - start)
    for first, last in chosen(answer):
        counts[start + first : start + last] = [1.0] * (last - first)
    if not given:
        # Whether it is an answer of this shape at all, and whether another call follows.
        counts[start] = 1.0
        for end in (match.end() for match in re.finditer(TAGS[1], answer)):
            counts[start + end] = 1.0
        counts[stop - len(END) : stop] = [1.0] * len(END)


_PARTS = re.compile(r'</?tool_call>|"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def chosen(text: str) -> Iterator[tuple[int, int]]:
    """The parts of JSON that its schema does not settle: values, without the mark that tells their type, and whether a
    list goes on."""
    inside: list[str] = []
    for part in _PARTS.finditer(text):
        word = part.group()
        if word in "{[":
            inside.append(word)
        elif word in "}]":
            inside.pop()
            if word == "]":
                yield part.span()
        elif word == ",":
            if inside[-1] == "[":
                yield part.span()
        elif word.startswith('"'):
            if not text[part.end() :].startswith(":"):
                yield part.start() + 1, part.end()
        elif word != ":" and word not in TAGS:
            yield part.span()
