"""An answer cut at its tokens' ends, and which of these tokens its content is made of: for their logprobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.outputs.messages.message import ContentDelta, Delta
from quire.platform.outputs.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.platform.sampling.params import SamplingParams


class TokenTexts:
    """Of one choice, whole or in parts: however an answer comes, the same cuts are made."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        """params: how the tokens were made text; stop texts have no part in it."""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer: Detokenizer | None = None
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()  # (where its text ends, token id, logprobs)
        self._text = ""  # that has come and belongs to no token that has come
        self._taken = 0  # characters before it

    def cut(self, output: RequestOutput) -> list[RequestOutput]:
        """An output as one for each token whose text is complete; with its last one, all of the rest. Text may come
        after its tokens, and a stop text's tokens have none.
        """
        (completion,) = output.outputs
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self._tokenizer, output.prompt_token_ids, self._params)
        for token_id, entries in zip(completion.token_ids, completion.logprobs or (), strict=True):
            self._detokenizer.append(token_id)
            self._waiting.append((len(self._detokenizer.text), token_id, entries))
        self._text += completion.text
        ended = completion.finish_reason is not None
        made = []
        while self._waiting and (ended or self._waiting[0][0] <= self._taken + len(self._text)):
            end, token_id, entries = self._waiting.popleft()
            made.append(self._piece(completion, max(0, end - self._taken), [token_id], [entries]))
        if ended:
            rest = self._piece(completion, len(self._text), [], [])
            made.append(replace(rest, finish_reason=completion.finish_reason, stop_reason=completion.stop_reason))
        return [replace(output, outputs=[piece], finished=piece.finish_reason is not None) for piece in made]

    def _piece(
        self, completion: CompletionOutput, length: int, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> CompletionOutput:
        text, self._text = self._text[:length], self._text[length:]
        self._taken += len(text)
        return replace(
            completion, text=text, token_ids=token_ids, logprobs=logprobs, finish_reason=None, stop_reason=None
        )


class ContentTokens:
    """Which tokens content is made of, while a parser holds text back and takes tags out of it."""

    def __init__(self) -> None:
        self._held: list[tuple[str, dict[str, Any] | None]] = []  # (its text, what is to be told of it)

    def of(
        self, text: str, told: Sequence[dict[str, Any]], deltas: Sequence[Delta], ended: bool
    ) -> list[dict[str, Any]]:
        """Of a token, its text, and what a parser has made of that: what is to be told with the content. Of tokens of
        reasoning, calls and tags nothing is, nor of spaces around calls. ended: nothing follows; then tokens without
        text belong to the content.
        """
        self._held += [(text, one) for one in told]
        if not (deltas or ended):
            return []
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        first, last = _place_of(content, "".join(text for text, _ in self._held))
        chosen, kept, place = list[dict[str, Any]](), list[tuple[str, dict[str, Any] | None]](), 0
        for text, one in self._held:
            begin, place = place, place + len(text)
            inside = begin < last and (place > first or (begin == place == first))
            if one is not None and ((content and inside) or (ended and not text and begin >= last)):
                chosen.append(one)
                one = None
            if place > last or begin >= last:
                kept.append((text[max(0, last - begin) :], one))
        self._held = kept if content else []
        return chosen


def _place_of(content: str, whole: str) -> tuple[int, int]:
    """Where content is in a text of which the rest is tags, or is held back. Spaces may stand elsewhere."""
    if whole.endswith(content):
        return len(whole) - len(content), len(whole)
    core = content if content in whole else content.strip()
    first = whole.rfind(core) if core else -1
    if first < 0:
        return 0, 0
    last = first + len(core)
    if core is not content:
        first, last = len(whole[:first].rstrip()), len(whole) - len(whole[last:].lstrip())
    return first, last
