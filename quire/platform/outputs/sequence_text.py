"""What has become of sequences' tokens: their text, and what of it was handed out."""

from __future__ import annotations

from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.scheduling.request import SequenceState


class SequenceText:
    """The text of one sequence.

    taken: tokens that the text is made of. sent: tokens and characters that were handed out, of a request that streams
    what is new.
    """

    __slots__ = ("_detokenizer", "sent", "taken")

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self.taken = 0
        self.sent = (0, 0)

    def take(self, sequence: SequenceState) -> str | None:
        """Turn the sequence's new tokens into text. Returns the stop string that ends it, if there is one."""
        detokenizer, reason = self._detokenizer, sequence.finish_reason
        if detokenizer is None or reason == "error":
            return None
        tokens = sequence.output_ids
        end = len(tokens)
        if reason == "stop" and not sequence.request.params.include_stop_str_in_output:
            end -= 1  # the token that ends it is not shown
        stop = None
        while self.taken < end and stop is None:
            stop = detokenizer.append(tokens[self.taken])
            self.taken += 1
        if stop is not None or reason is not None:
            detokenizer.finish()
        return stop

    def emittable(self, finished: bool) -> str:
        """The text that nothing can take back."""
        return self._detokenizer.emittable(finished) if self._detokenizer is not None else ""


class RequestText:
    """The texts of one request's sequences, made as they are asked for.

    beginning: of each text; it continues the prompt. is_empty: no text is made. sequences: the texts, by the sequences'
    ids. A sequence that forks from another takes in the tokens that they have in common once more, so that it does not
    matter when it does.
    """

    __slots__ = ("_beginning", "is_empty", "sequences")

    def __init__(self, beginning: Detokenizer | None = None) -> None:
        self._beginning = beginning
        self.is_empty = beginning is None  # no text is made
        self.sequences: dict[int, SequenceText] = {}

    def of(self, sequence: SequenceState) -> SequenceText:
        """One sequence's."""
        text = self.sequences.get(sequence.id)
        if text is None:
            text = SequenceText(None if self._beginning is None else self._beginning.fork())
            self.sequences[sequence.id] = text
        return text
