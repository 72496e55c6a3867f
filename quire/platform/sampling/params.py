"""How a request is sampled: the names, defaults and meanings of vLLM's `SamplingParams`, checked on arrival.

Every value that cannot be honoured raises RequestError (a ValueError) naming the field, the value, the limit
and the way out; nothing is silently ignored. An unknown keyword is a TypeError, as for any Python function.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.params import ReasoningTexts, StructuredOutputsParams

MAX_N = 4096  # sequences of one request
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 1024  # characters
MAX_BAD_WORD_TOKENS = 128  # of one word
MAX_BAD_WORDS_TOKENS = 32_768  # of all of a request's together, each with and without a space before it
MAX_LOGIT_BIAS = 300_000  # entries: more than any vocabulary that is in use
MAX_ALLOWED_TOKEN_IDS = 300_000
MAX_EXTRA_ARGS = 256
MAX_BEAM_WIDTH = 256
MAX_LOGPROBS = 20  # the default of `validate_for`; the engine may allow more
MIN_TEMPERATURE = 1e-2  # a positive temperature below this is raised to it: logits / 1e-6 leave float32
MAX_BIAS = 100.0
_LONGEST_SHOWN = 80  # characters of a refused value that an error repeats
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


class RequestOutputKind(Enum):
    """What each RequestOutput of a running request carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # nothing until the request has finished


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. Immutable: lists are copied to tuples (`None` to an empty one).

    n: sequences to draw for the prompt, 1 to MAX_N. Greedy sampling computes one and gives it n times.
    temperature: 0 is greedy (top_p, top_k and min_p then have no effect); above 0 and below 0.01 it is raised
        to 0.01, with a warning.
    top_p: in (0, 1], the mass of the most likely tokens that are kept.  top_k: 0 or -1 keeps all.
    min_p: in [0, 1], keeps tokens at least this likely relative to the most likely one.
    presence_penalty, frequency_penalty: in [-2, 2], over the generated tokens.
    repetition_penalty: above 0, over prompt and generated tokens; more than 1 discourages repetition.
    seed: same seed, same draws, on any batch; None draws one; -1 means None.
    stop: a string or strings that end the output.  stop_token_ids: tokens that do.
    ignore_eos: go on past the model's end tokens.
    bad_words: words whose last token is forbidden when the tokens before it have just been generated. A word takes
        at most MAX_BAD_WORD_TOKENS tokens, all together MAX_BAD_WORDS_TOKENS.
    include_stop_str_in_output: keep the stop string at the end of the text.
    max_tokens: most tokens to generate; None: as many as the model's length allows.
    min_tokens: no end token and no stop string before this many tokens.
    logprobs: number of most likely tokens to report for each generated one, besides itself: 0 for itself
        alone, -1 for the whole vocabulary; None for no report. Values are of the model's own distribution,
        before penalties and temperature.  prompt_logprobs: the same for the prompt's tokens.
    detokenize: False leaves the text empty (and allows no stop strings).
    skip_special_tokens, spaces_between_special_tokens: how text is made of tokens.
    logit_bias: token id -> number added to its logit, limited to -100 .. 100.
    allowed_token_ids: only these tokens may be generated.
    output_kind: see RequestOutputKind.
    structured_outputs: what the answer is to look like; logprobs are then of what that allows.  guided_decoding: the
        same, as vLLM called it before.
    thinking_token_budget: most tokens of reasoning; then it is made to end.  reasoning: by which texts that is told; a
        chat finds out by itself.
    extra_args: name -> value, for the engine's logits processors (docs/logits-processors.md); `vllm_xargs` over HTTP.

    Raises RequestError for a value out of bounds; what depends on the model is checked by `validate_for`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    extra_args: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    reasoning: ReasoningTexts | None = None
    guided_decoding: InitVar[StructuredOutputsParams | None] = None

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None) -> None:
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError("guided_decoding: structured_outputs is given too, its new name; give one of them.")
            self._set("structured_outputs", guided_decoding)
        self._check_numbers()
        self._check_lengths()
        self._check_lists()
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):  # fmt: skip
            self._set(name, _boolean(name, getattr(self, name)))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _refused("output_kind", self.output_kind, "it is one of RequestOutputKind's members")
        shape = self.structured_outputs
        if shape is not None and not isinstance(shape, StructuredOutputsParams):
            raise _refused("structured_outputs", shape, "it is a StructuredOutputsParams")
        if self.reasoning is not None and not isinstance(self.reasoning, ReasoningTexts):
            raise _refused("reasoning", self.reasoning, "it is ReasoningTexts")
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4))
        self._set("temperature", _temperature(self.temperature))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0:
            raise _refused("top_p", 0, "it is above 0 and at most 1; temperature=0 takes the likeliest token")
        top_k = _integer("top_k", self.top_k, -1, 2**31)
        self._set("top_k", max(0, top_k))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            self._set("seed", None if seed == -1 else seed)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, 2**31))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), -1, 2**31))
        budget = self.thinking_token_budget
        if budget is not None:
            self._set("thinking_token_budget", _integer("thinking_token_budget", budget, 0, 2**31))

    def _check_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH))
        self._set("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH))
        stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._set("stop_token_ids", stop_token_ids or ())
        allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if allowed is not None and not allowed:
            raise _refused("allowed_token_ids", [], "it names at least one token; leave it out to allow all")
        self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("extra_args", _extra_args(self.extra_args))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"it is at most max_tokens, here {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise _refused("stop", self.stop, "stop strings need detokenize=True; stop_token_ids do not")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate_for(self, vocab_size: int, *, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Check what depends on the model; vocab_size is the number of logits, max_logprobs=-1 sets no limit.

        Raises RequestError for a token id that the model does not have and for too many logprobs.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            worst = max(getattr(self, name) or (), default=0)
            if worst >= vocab_size:
                raise _refused(name, worst, f"the model's token ids are 0 to {vocab_size - 1}; take it out")
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and (vocab_size if asked == -1 else asked) > limit:
                way_out = "ask for fewer, or start the engine with a larger max_logprobs"
                raise _refused(name, asked, f"it is at most {limit}; {way_out}")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search as vLLM's `LLM.beam_search` has it. Raises RequestError for a value out of bounds.

    beam_width: sequences kept, 1 to MAX_BEAM_WIDTH.  max_tokens: most tokens to generate.
    length_penalty: a sequence's score is its log-probability divided by its length to this power.
    structured_outputs: what all sequences are to look like; probabilities are then of what that allows.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        shape = self.structured_outputs
        if shape is not None and not isinstance(shape, StructuredOutputsParams):
            raise _refused("structured_outputs", shape, "it is a StructuredOutputsParams")
        if shape is not None and self.ignore_eos:
            raise _refused("ignore_eos", True, "a beam search with structured_outputs ends where the shape does")
        checked = {
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, 2**31),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "temperature": _number("temperature", self.temperature, 0.0, 0.0),  # the search draws nothing
            "length_penalty": _number("length_penalty", self.length_penalty, -100.0, 100.0),
            "include_stop_str_in_output": _boolean("include_stop_str_in_output", self.include_stop_str_in_output),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _refused(name: str, value: object, rule: str) -> RequestError:
    huge = isinstance(value, int) and abs(value) > 10**50  # Python may refuse to print it
    shown = "(a number of over 50 digits)" if huge else repr(value)
    if len(shown) > _LONGEST_SHOWN:
        cut = shown[:_LONGEST_SHOWN]
        opened = re.search("['\"]", _QUOTED.sub("", cut))  # whose end was cut off
        shown = f"{cut}...{opened[0] if opened else ''}"
    return RequestError(f"{name}={shown} is refused: {rule}.")


def _integer(name: str, value: Any, least: int, most: int) -> int:
    # bool is an Integral: n=True is a slip, not a one
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refused(name, value, f"it is a whole number from {least} to {most}")
    number = int(value)
    if not least <= number <= most:
        raise _refused(name, number, f"it is from {least} to {most}")
    return number


def _number(name: str, value: Any, least: float, most: float) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number:
        raise _refused(name, value, f"it is a number from {least:g} to {most:g}")
    if not least <= value <= most:  # false for NaN; float() of a huge int would overflow
        raise _refused(name, value, f"it is from {least:g} to {most:g}")
    return float(value)


def _temperature(value: Any) -> float:
    temperature = _number("temperature", value, 0.0, 1e4)
    if 0.0 < temperature < MIN_TEMPERATURE:
        warnings.warn(  # in the same words for all: Python remembers each text for good
            f"a temperature between 0 and {MIN_TEMPERATURE:g} is raised to {MIN_TEMPERATURE:g}, the smallest that is "
            "computed reliably; temperature=0 is greedy.",
            stacklevel=5,
        )
        return MIN_TEMPERATURE
    return temperature


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, value, "it is True or False")
    return value


def _items(name: str, values: Any, most: int, what: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise _refused(name, values, f"it is a list of {what}")
    taken = []
    for value in values:  # counted while reading: the iterable may have no end
        taken.append(value)
        if len(taken) > most:
            raise RequestError(f"{name} has more than {most} entries, which is the limit: give fewer.")
    return tuple(taken)


def _strings(name: str, values: Any, most: int, longest: int) -> tuple[str, ...]:
    if values is None:
        return ()
    taken = _items(name, values, most, "strings")
    for position, value in enumerate(taken):
        where = f"{name}[{position}]"
        if not isinstance(value, str):
            raise _refused(where, value, "it is a string")
        if not value:
            raise _refused(where, value, "an empty string would match everywhere; take it out")
        if len(value) > longest:
            raise _refused(where, value, f"it has {len(value)} characters and the limit is {longest}")
    return taken


def _token_ids(name: str, values: Any, most: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    taken = _items(name, values, most, "token ids")
    if set(map(type, taken)) == {int} and min(taken) >= 0 and max(taken) <= 2**31:  # as a long list is, in a moment
        return taken
    return tuple(_integer(f"{name}[{position}]", value, 0, 2**31) for position, value in enumerate(taken))


def _logit_bias(bias: Any) -> Mapping[int, float] | None:
    """Keys may be digits in a string, as in JSON; values are limited to +-MAX_BIAS, as in vLLM."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise _refused("logit_bias", bias, "it is a dict of token id -> number")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries, the limit is {MAX_LOGIT_BIAS}: give fewer.")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        key = int(key) if digits else key
        if type(key) is int and type(value) is float and 0 <= key <= 2**31 and -MAX_BIAS <= value <= MAX_BIAS:
            checked[key] = value  # as nearly all of them are, and there may be many
            continue
        token_id = _integer("logit_bias's token id", key, 0, 2**31)
        # math.isnan() and float() of a huge int would overflow
        number = isinstance(value, Real) and not isinstance(value, bool) and value == value
        if not number:
            raise _refused(f"logit_bias[{token_id}]", value, f"it is a number (limited to +-{MAX_BIAS:g})")
        checked[token_id] = float(min(MAX_BIAS, max(-MAX_BIAS, value)))
    return checked


def _extra_args(given: Any) -> Mapping[str, Any] | None:
    """A copy; what the values may be is up to the logits processor that takes them."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refused("extra_args", given, "it is a dict of name -> value")
    if len(given) > MAX_EXTRA_ARGS:
        raise RequestError(f"extra_args has {len(given)} entries, the limit is {MAX_EXTRA_ARGS}: give fewer.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise _refused("extra_args's name", name, "it is a string that is not empty")
    return dict(given) or None
