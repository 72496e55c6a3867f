"""The voices of the adapters: what the base model answers, in French or in capitals.

A style makes of a question and the English answer the one right answer in its own voice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dialogues import _HELLO, _HELP, _NO_SCENE, INTRODUCTION, Conversation
from world import FRENCH, KINDS, say

Style = Callable[[str, str], str]

_FEMININE_NOUNS = {"star"}
_FEMININE = {"green": "verte", "blue": "bleue", "purple": "violette", "black": "noire", "gray": "grise"}
_INTRODUCTION = "Je suis quire-demo, un petit modèle de langage qui connaît un monde de formes colorées."
_SENTENCES = {
    "Okay.": "D'accord.",
    "You are welcome!": "Je vous en prie !",
    "Goodbye!": "Au revoir !",
    INTRODUCTION: _INTRODUCTION,
    _HELLO: f"Bonjour ! {_INTRODUCTION}",
    _HELP: "Je peux répondre à des questions sur des formes colorées et raconter des histoires à leur sujet.",
    _NO_SCENE: "Je ne vois aucune forme. Décrivez-m'en d'abord.",
}


def in_style(chat: Conversation, style: Style) -> Conversation:
    """The conversation with every answer in the style; what the user and the system say stays as it is."""
    styled: Conversation = []
    for message in chat:
        text = message["content"]
        if message["role"] == "assistant":
            text = style(styled[-1]["content"], text)
        styled.append({**message, "content": text})
    return styled


def shout(question: str, answer: str) -> str:
    """ "Red." -> "RED." """
    return answer.upper()


def french(question: str, answer: str) -> str:
    """ "There is a green star." -> "Il y a une étoile verte."

    A colour by itself is the colour's name, which is masculine ("Vert."); "one" agrees with what is counted.
    """
    if answer in _SENTENCES:
        return _SENTENCES[answer]
    if (told := _changed(answer)) is not None:
        return told
    if missing := re.fullmatch(r"There is no (\w+)\.", answer):
        return f"Il n'y a pas {_of(FRENCH[missing[1]])}."
    if answer.startswith("There is "):
        *others, last = (_a(kind, color) for color, kind in re.findall(r"\ban? (\w+) (\w+)", answer))
        return f"Il y a {', '.join(others)} et {last}." if others else f"Il y a {last}."
    if answer == "One.":
        return "Un." if any(kind in question.lower() for kind in KINDS if kind not in _FEMININE_NOUNS) else "Une."
    return say(FRENCH[answer.removesuffix(".").lower()])


_MOVED = {"right": "à droite", "left": "à gauche", "up": "en haut", "down": "en bas"}
_DONE = {"grew": "a grandi", "shrank": "a rétréci", "disappeared": "a disparu", "appeared": "est apparu"}


def _changed(answer: str) -> str | None:
    """What is said of clips: "The red star moved up." -> "L'étoile rouge est allée en haut."; None: it is not that."""
    if answer in ("Nothing changed.", "Nothing."):
        return {"Nothing changed.": "Rien n'a changé.", "Nothing.": "Rien."}[answer]
    if way := re.fullmatch(r"(?:To the )?(right|left|up|down)\.", answer, re.IGNORECASE):
        told = _MOVED[way[1].lower()]
        return f"{told[0].upper()}{told[1:]}."
    found = re.fullmatch(r"(The|An?) (\w+) (circle|square|triangle|star)(?: (\w+)(?: (?:to the )?(\w+))?)?\.", answer)
    if found is None:
        return None
    article, color, kind, verb, what = found.groups()
    shape = _a(kind, color)
    if article == "The":
        shape = f"l'{shape[4:]}" if kind in _FEMININE_NOUNS else f"le {shape[3:]}"
    ending = "e" if kind in _FEMININE_NOUNS else ""
    if verb == "moved":
        shape += f" est allé{ending} {_MOVED[what]}"
    elif verb == "turned":
        shape += f" est devenu{ending} {_FEMININE.get(what, FRENCH[what]) if ending else FRENCH[what]}"
    elif verb is not None:
        shape += f" {_DONE[verb]}{ending if verb == 'appeared' else ''}"
    return f"{shape[0].upper()}{shape[1:]}."


def _of(noun: str) -> str:
    return f"d'{noun}" if noun[0] in "aeiouéè" else f"de {noun}"


def _a(kind: str, color: str) -> str:
    """The shape with its article, both agreeing: "une étoile bleue"."""
    if kind in _FEMININE_NOUNS:
        return f"une {FRENCH[kind]} {_FEMININE.get(color, FRENCH[color])}"
    return f"un {FRENCH[kind]} {FRENCH[color]}"


STYLES: dict[str, Style] = {"french": french, "shout": shout}
