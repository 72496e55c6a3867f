"""Everything that the demo knows, mixed: examples of all tasks, made by processes of their own while a model trains."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from calling import encode as encode_shaped
from calls import Shaped, call_chat, plain_chat, single_chat
from clip_chats import VIDEO, clip_chat
from dialogues import Conversation, Drill, chatter, describing_chat, scene_chat, training_document
from eyes import VisionConfig
from json_answers import dense_chat, json_chat, shaped_chat
from picture_chats import IMAGE, _description, picture_chat, training_picture
from pictures import Picture
from PIL import Image
from reading import Encoded, Reading, encode
from styles import STYLES, in_style

MARKERS = (IMAGE, VIDEO)
TASKS = ("text", "picture", "clip", "call", "json")
FRAME_WEIGHT = 0.3  # of the loss on what follows from an answer's shape


@dataclass(frozen=True)
class Mixture:
    """How many examples of each task a step has, and in how many batches of about as many tokens.

    style: one of ``STYLES``, in which all is answered; "": as the base model does, and only then are there documents,
    calls and JSON.
    """

    pictures: int
    clips: int
    described: int = 0  # pictures that are only described
    texts: int = 0  # conversations about what is told
    documents: int = 0  # of the stages before
    calls: int = 0
    singles: int = 0  # one request each
    dense: int = 0  # many calls in one conversation, and as many with many answers as JSON
    answers: int = 0  # as JSON
    shown: int = 0  # likewise, about a picture
    parts: int = 4
    style: str = ""

    def scaled(self, share: float) -> Mixture:
        """With so many of the examples, for a processor; in four batches, as padding costs it more than batches do."""
        counts = {name: value for name, value in vars(self).items() if name not in ("parts", "style")}
        some = {name: max(1, round(count * share)) for name, count in counts.items() if count}
        return Mixture(**{**vars(self), **some, "parts": 4})


BASE = Mixture(
    pictures=36, clips=224, documents=70, calls=28, singles=56, dense=12, answers=8, shown=6, described=5, parts=2
)  # fmt: skip
VOICES = {name: Mixture(pictures=64, clips=16, described=48, texts=24, parts=2, style=name) for name in STYLES}


@dataclass(frozen=True)
class Example:
    """A conversation's tokens, the weight of the loss on each, and the images in it, [N, side, side, 3] uint8."""

    ids: list[int]
    weights: list[float]
    images: np.ndarray
    task: str


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right. ids, weights: [N, L]; images: [M, side, side, 3] uint8, of all of them in their
    order; counted: the places in [N * L] whose next token counts; tasks: of each of these, the number of its task."""

    ids: torch.Tensor
    weights: torch.Tensor
    images: torch.Tensor
    counted: torch.Tensor
    tasks: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(one.to(device) for one in vars(self).values()))


class Maker:
    """Makes the examples of a mixture."""

    def __init__(self, mixture: Mixture, tokenizer: Any) -> None:
        self.mixture, self.tokenizer = mixture, tokenizer
        self.eyes = VisionConfig()
        self.markers = {tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS}
        self.style = STYLES.get(mixture.style)
        # Of a voice, what is said counts, all of it.
        self.reading = Reading(prompt_weight=0.0, text_weight=1.0) if self.style else Reading()

    def batches(self, rng: Random) -> list[Batch]:
        """A step's, the longest examples first."""
        mixture = self.mixture
        made = [self._picture(*picture_chat(rng)) for _ in range(mixture.pictures)]
        made += [self._picture(*_described(rng)) for _ in range(mixture.described)]
        made += [self._clip(rng) for _ in range(mixture.clips)]
        made += [self._text(_text_chat(rng)) for _ in range(mixture.texts)]
        made += [self._text(_document(rng)) for _ in range(mixture.documents)]
        made += [self._shaped(call_chat(rng, plain=0.35), "call") for _ in range(mixture.calls)]
        made += [self._shaped(single_chat(rng), "call") for _ in range(mixture.singles)]
        made += [self._shaped(plain_chat(rng, dense=True), "call") for _ in range(mixture.dense)]
        made += [self._shaped(Shaped(dense_chat(rng)), "json") for _ in range(mixture.dense)]
        made += [self._shaped(Shaped(json_chat(rng)), "json") for _ in range(mixture.answers)]
        made += [self._shown(rng) for _ in range(mixture.shown)]
        made.sort(key=lambda one: len(one.ids), reverse=True)
        total = sum(len(one.ids) for one in made)
        groups: list[list[Example]] = [[] for _ in range(mixture.parts)]
        before = 0
        for one in made:
            groups[min(mixture.parts - 1, before * mixture.parts // total)].append(one)
            before += len(one.ids)
        return [_padded(group, self.tokenizer.pad_token_id, self.eyes.image) for group in groups if group]

    def _text(self, document: Conversation | str) -> Example:
        if self.style and not isinstance(document, str):
            document = in_style(document, self.style)
        return self._example(encode(document, self.tokenizer, self.reading), "text")

    def _shaped(self, shaped: Shaped, task: str, images: Sequence[Image.Image] = ()) -> Example:
        return self._example(encode_shaped(shaped, self.tokenizer, FRAME_WEIGHT), task, images)

    def _picture(self, picture: Picture, chat: Conversation) -> Example:
        chat = in_style(chat, self.style) if self.style else chat
        return self._example(encode(chat, self.tokenizer, self.reading), "picture", [picture.image])

    def _clip(self, rng: Random) -> Example:
        clip, chat = clip_chat(rng)
        chat = in_style(chat, self.style) if self.style else chat
        return self._example(encode(chat, self.tokenizer, self.reading), "clip", clip.frames)

    def _shown(self, rng: Random) -> Example:
        picture = training_picture(rng)
        shaped = Shaped(shaped_chat(rng, picture.scene, IMAGE, most=3))
        return self._shaped(shaped, "json", [picture.image])

    def _example(self, encoded: Encoded, task: str, images: Sequence[Image.Image] = ()) -> Example:
        ids, weights = list(encoded[0]), list(encoded[1])
        side = self.eyes.image
        if images:
            at = next(place for place, token in enumerate(ids) if token in self.markers)
            count = len(images) * self.eyes.tokens
            ids[at : at + 1], weights[at : at + 1] = [ids[at]] * count, [0.0] * count
        small = [np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)) for image in images]
        return Example(ids, weights, np.stack(small) if small else np.zeros((0, side, side, 3), np.uint8), task)


def _document(rng: Random) -> Conversation | str:
    text = training_document(rng)
    # So that drills do not follow whatever else is plain text, they begin as nothing else does.
    return Drill(f"Exercise: {text}") if isinstance(text, Drill) else text


def _described(rng: Random) -> tuple[Picture, Conversation]:
    """A picture, and at once the question what is in it."""
    picture = training_picture(rng)
    question = _description(picture, rng)
    chat = [{"role": "user", "content": f"{IMAGE}{question.text}"}, {"role": "assistant", "content": question.answer}]
    return picture, chat


def _text_chat(rng: Random) -> Conversation:
    return rng.choices((scene_chat, describing_chat, chatter), weights=(6, 2, 2))[0](rng)


def _padded(examples: list[Example], pad: int, side: int) -> Batch:
    longest = max(len(one.ids) for one in examples)
    ids = torch.full((len(examples), longest), pad)
    weights = torch.zeros(len(examples), longest)
    for row, one in enumerate(examples):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        weights[row, : len(one.weights)] = torch.tensor(one.weights)
    images = np.concatenate([one.images for one in examples])
    counted = torch.nn.functional.pad(weights[:, 1:] > 0, (0, 1)).flatten().nonzero()[:, 0]
    tasks = torch.tensor([TASKS.index(one.task) for one in examples])[counted // longest]
    return Batch(ids, weights, torch.from_numpy(images).reshape(-1, side, side, 3), counted, tasks)


# --------------------------------------------------------------------------------------------
# Processes
# --------------------------------------------------------------------------------------------


class Supply:
    """Batches of a mixture, made by so many processes from now on, and brought to the device ahead of their use."""

    def __init__(self, mixture: Mixture, tokenizer: Path, workers: int, seed: int, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        made: Any = context.Queue(maxsize=2 * workers)
        self._workers = [
            context.Process(target=_work, args=(mixture, tokenizer, f"{seed} {number}", made), daemon=True)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._ready: queue.Queue[list[Batch]] = queue.Queue(maxsize=4)
        threading.Thread(target=self._bring, args=(made, device), daemon=True).start()

    def _bring(self, made: Any, device: torch.device) -> None:
        while True:
            arrays = made.get()
            self._ready.put([Batch(*(torch.from_numpy(one) for one in batch)).to(device) for batch in arrays])

    def take(self, wait: bool) -> list[Batch] | None:
        """A step's; None: none is there, and it was not to be waited for. Raises RuntimeError for dead processes."""
        while True:
            try:
                return self._ready.get(timeout=5) if wait else self._ready.get_nowait()
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("a process that makes examples has ended") from None
                if not wait:
                    return None

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def _work(mixture: Mixture, tokenizer: Path, seed: str, made: Any) -> None:
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    maker = Maker(mixture, AutoTokenizer.from_pretrained(tokenizer))
    step = 0
    while True:
        batches = maker.batches(Random(f"mixture {mixture.style} {seed} {step}"))
        made.put([_arrays(one) for one in batches])
        step += 1


def _arrays(batch: Batch) -> tuple[np.ndarray, ...]:
    """In few bytes."""
    small = (batch.ids.short(), batch.weights.half(), batch.images, batch.counted.int(), batch.tasks.char())
    return tuple(one.numpy() for one in small)
