"""`LLM`: prompts in, outputs out, in the manner of vLLM's class of that name."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from quire.config.arguments import llm_settings, takes_settings
from quire.config.generation import default_sampling
from quire.config.not_served import method_not_served
from quire.errors import RequestError
from quire.lora import AdapterInfo, LoadReport, LoRARequest
from quire.platform.engine.conversations import ChatOptions, Conversations
from quire.platform.engine.interrupts import HeldInterrupt
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.metrics import Metric, metrics_of
from quire.platform.engine.pooling_calls import PoolingCalls
from quire.platform.inputs.batch import one_for_each, prompt_list
from quire.platform.inputs.plain_tokenizer import full_tokenizer
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.beams import beams_as_output
from quire.platform.outputs.outputs import BeamSearchOutput, RequestOutput
from quire.platform.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from typing import Unpack

    from quire.config.engine_args import EngineArgs
    from quire.config.typed_arguments import LLMArguments

logger = logging.getLogger("quire")
Message = Mapping[str, Any]
Params = SamplingParams | BeamSearchParams

_POLL_SECONDS = 0.02  # seconds until unloading looks again


@takes_settings
class LLM(PoolingCalls):
    """A model that answers batches of prompts, in continuous batching. Calls from several threads wait for each other.

    Args: (the table is in docs/settings.md; None leaves the default, which stands in brackets)
        {settings}
        Names that vLLM has beside these are taken, with a line in the log, where they ask for nothing else than what is
            done, and else refused with the reason; see docs/from-vllm.md.

    Raises:
        UnsupportedModelError, CheckpointError, QuireError: all ValueErrors, for what cannot be loaded.
    """

    def __init__(self, model: str | None = None, **settings: Unpack[LLMArguments]) -> None:
        made = llm_settings(model=model, **settings)
        self._requests = made.requests
        SamplingParams(**made.requests.override_generation_config)  # what is wrong with it is said now
        if made.note is not None:
            logger.warning("LLM(): %s", made.note)  # the level that Python shows of itself
        self.llm_engine = LLMEngine(made.engine)
        self._ids = count()
        self._lock = threading.Lock()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; None when skip_tokenizer_init was set."""
        return full_tokenizer(self.llm_engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling that the checkpoint recommends, or `generation_config` and `override_generation_config` say."""
        return SamplingParams(**default_sampling(self.llm_engine.path, self._requests))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM of `EngineArgs`."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come back in the order of the prompts.

        prompts: one or a list of texts, lists of token ids, or dicts with "prompt" or "prompt_token_ids". A dict may
        also have "multi_modal_data": {"image": one image or a list}, as many as the prompt has image markers: PIL
        images, uint8 arrays, bytes of image files, URLs, or features {"image_embeds": [tokens, width]};
        {"video": one or a list}: frames, (frames, metadata), bytes, a path or a URL; and {"audio": one or a list}:
        samples, (samples, rate), bytes, a path or a URL;
        "mm_processor_kwargs", settings for the image processor; and "cache_salt": requests with different salts share
        no cached blocks.
        sampling_params: one for all, one for each, or None for `get_default_sampling_params()`. BeamSearchParams
        search: outputs are the beams, best first.
        lora_request: the adapter for all, or one or None (the base model) for each; loaded first where it is not.

        Raises RequestError, a ValueError, when a prompt or its parameters are impossible; nothing is left running. A
        request whose image turns out to be no good ends with finish_reason "error", and its stop_reason says why.
        """
        batch = prompt_list(prompts)
        params = self._params_list(sampling_params, len(batch))
        final = [
            p if isinstance(p, BeamSearchParams) else dataclasses.replace(p, output_kind=RequestOutputKind.FINAL_ONLY)
            for p in params
        ]
        outputs = self._run(batch, final, use_tqdm, self._adapters_list(lora_request, len(batch)))
        return [self._shown(output) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}.

        The tokenizer's chat template, or `chat_template`, makes the prompts; it runs in a sandbox. Content may be a
        list of parts: {"type": "text", "text": ...} and images, as {"type": "image_url", "image_url": {"url": ...}},
        {"type": "image_pil", "image_pil": ...} or {"type": "image", "image": ...}. Image markers in texts stay text.

        tools: that the model may call, as OpenAI's `tools` has them, or Python functions with docstrings.
        tool_choice: "auto", "none", "required" or {"type": "function", "function": {"name": ...}}; the last two force
        calls. parallel_tool_calls: whether an answer may have several.

        Each of an output's completions has its `message`, reasoning and calls of tools told apart from the content,
        beside its `text`. A shape (`SamplingParams.structured_outputs`) is that of the answer, behind the reasoning.

        Raises RequestError when there is no template or the messages do not fit it.
        """
        if not isinstance(messages, Sequence):
            raise RequestError(f"messages must be a list of messages, or a list of such lists, not {messages!r}")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        image_spec = self.llm_engine.input_processor.image_spec
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=chat_template_kwargs,
        )
        marker = image_spec.marker if image_spec else None
        lay_out = image_spec.written if image_spec else None
        others = image_spec.words if image_spec else {}
        numbered = image_spec.numbered if image_spec else None
        chat = Conversations(self.llm_engine.tokenizer, marker, self._requests, options, lay_out, others, numbered)
        rendered = [chat.render(conversation) for conversation in conversations]
        prompts = [chat.prompt(one, mm_processor_kwargs) for one in rendered]
        begins = [chat.begins_in_reasoning(*one) for one in zip(rendered, conversations, strict=True)]
        params = self._params_list(sampling_params, len(prompts))
        shaped = [chat.constrained(*one) for one in zip(params, begins, strict=True)]
        outputs = self.generate(prompts, shaped, lora_request=lora_request, use_tqdm=use_tqdm)
        return [chat.answered(*one) for one in zip(outputs, params, begins, strict=True)]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` likeliest continuations of each prompt, best first."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, not {params!r}")
        batch = prompt_list(prompts)
        return self._run(batch, [params] * len(batch), use_tqdm, self._adapters_list(lora_request, len(batch)))

    def load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        lora_int_id: int | None = None,
    ) -> LoadReport:
        """Load an adapter from a folder (PEFT's format) and let `lora_name` stand for it.

        From any thread, while others generate. load_inplace: the name may be taken; running requests finish on the
        version that they began with. pinned: it stays in main memory. Raises AdapterError: an adapter binds
        completely, or is refused with the list of what does not.
        """
        return self.llm_engine.load_lora_adapter(lora_name, str(lora_path), load_inplace, pinned, lora_int_id)

    def unload_lora_adapter(self, lora_name: str) -> int:
        """Forget an adapter, wait until no request holds it, and return the bytes that its weights took in memory.

        Raises AdapterError for a name that is not loaded, and RequestError where requests of llm_engine hold it, which
        nobody steps here: its bytes go when they have ended.
        """
        unloading = self.llm_engine.unload_lora_adapter(lora_name)
        while True:
            idle = self._lock.acquire(timeout=_POLL_SECONDS)  # else a generate() steps
            try:
                if idle:
                    self.llm_engine.core.settle()
                freed = self.llm_engine.freed_bytes(unloading, 0.0 if idle else _POLL_SECONDS)
                if freed is not None:
                    return freed
                if idle:
                    self._refuse_if_busy()
            finally:
                if idle:
                    self._lock.release()

    def pin_lora_adapter(self, lora_name: str, pinned: bool = True) -> None:
        """Keep an adapter in main memory, or no longer; of those on the device it goes last. Raises AdapterError."""
        self.llm_engine.pin_lora_adapter(lora_name, pinned)

    def list_lora_adapters(self) -> list[AdapterInfo]:
        """All adapters that are loaded, and where their weights are."""
        return self.llm_engine.list_lora_adapters()

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights, KV blocks and images' features until `wake_up`; adapters stay loaded.

        level: 1 or 2, as vLLM has them; both read the weights again from their files. Meanwhile all that needs the
        model raises SleepingError. Raises CheckpointError, and stays awake, where the weights could not be read again.
        """
        with self._lock:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Read the weights again; answers are what they were. tags: of "weights" and "kv_cache", what is to wake up.

        Raises CheckpointError, and sleeps on, where the files have changed or memory does not suffice.
        """
        with self._lock:
            self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` is needed."""
        return self.llm_engine.is_sleeping

    def reset_prefix_cache(self) -> bool:
        """Forget the beginnings of prompts that were computed before. True: it was done."""
        with self._lock:
            return self.llm_engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Counts since the engine began, and gauges of this moment: their name, labels and value."""
        return metrics_of(self.llm_engine.stats())

    def __getattr__(self, name: str) -> Any:
        """Say of vLLM's methods that are not served why they are not."""
        raise AttributeError(f"LLM has no {name!r}{method_not_served(name)}")

    def _shown(self, output: Any) -> RequestOutput:
        return beams_as_output(self.llm_engine.tokenizer, output) if isinstance(output, BeamSearchOutput) else output

    def _adapters_list(
        self, wanted: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[LoRARequest | None]:
        """One for each prompt, all of them loaded."""
        adapters = one_for_each("lora_request", wanted, (LoRARequest, type(None)), count)
        for adapter in dict.fromkeys(adapters):  # before the engine is taken: others may generate meanwhile
            if adapter is not None and self.llm_engine.adapters is not None:
                self.llm_engine.lora.load_for(adapter)
        return [one and dataclasses.replace(one, load_inplace=False) for one in adapters]  # that has been done

    def _params_list(self, params: Params | Sequence[Params] | None, count: int) -> list[Params]:
        if params is None:
            params = self.get_default_sampling_params()
        return one_for_each("sampling_params", params, (SamplingParams, BeamSearchParams), count)

    def _run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[Any],
        use_tqdm: bool,
        adapters: Sequence[LoRARequest | None],
    ) -> list[Any]:
        from tqdm import tqdm

        ids: list[str] = []
        outputs: dict[str, Any] = {}
        with self._lock, HeldInterrupt() as interrupt:
            self._refuse_if_busy()
            try:
                for prompt, wanted, adapter in zip(prompts, params, adapters, strict=True):
                    request_id = str(next(self._ids))
                    self.llm_engine.add_request(request_id, prompt, wanted, adapter)
                    ids.append(request_id)
                with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm) as bar:
                    while len(outputs) < len(ids) and not interrupt.pressed:
                        for output in self.llm_engine.step():
                            outputs[output.request_id] = output
                            bar.update()
            finally:  # an impossible prompt, an interrupt: nothing of this call stays behind
                self.llm_engine.abort_request(ids)
        if len(outputs) < len(ids):  # the interrupt that was held ends this call, should it not have come yet
            raise KeyboardInterrupt
        return [outputs[request_id] for request_id in ids]

    def _refuse_if_busy(self) -> None:
        waiting = self.llm_engine.get_num_unfinished_requests()
        if waiting:
            raise RequestError(
                f"{waiting} requests were added to llm_engine and have not finished: "
                "step() it to their end, or abort them, before calling this."
            )
