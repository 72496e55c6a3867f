"""Programs written for vLLM: in a program."""

from __future__ import annotations

import base64
import dataclasses
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quire
from quire import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    load_chat_template,
)
from quire.demo import adapter_path, picture_path
from quire.platform.engine.metrics import Counter, Gauge
from quire.platform.outputs.beams import beams_as_output
from tests.server.vllm.helpers import GREEDY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROMPTS = ["Hello, my name is", "Once upon a time", "The star is", "One day, a red circle"]
SEEN = "<|user|><|image|>How many shapes are there?<|end|><|assistant|>"


@pytest.fixture
def picture() -> Image.Image:
    return Image.open(picture_path())


def test_the_quickstart(plain_model: Path) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=str(plain_model), gpu_memory_utilization=0.4, enable_chunked_prefill=True, swap_space=4)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    # What is drawn differs from run to run, and may end early.
    answers = [output.outputs[0] for output in outputs]
    assert all(1 <= len(one.token_ids) <= 16 and one.finish_reason in ("length", "stop") for one in answers)


def test_beam_search_through_generate(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    [output, other] = llm.generate(["Once upon a time", TokensPrompt(prompt_token_ids=[300, 301])], params)
    searched = llm.beam_search(["Once upon a time"], params)[0]
    assert isinstance(output, RequestOutput) and output.finished
    assert (output.prompt, other.prompt) == ("Once upon a time", None)
    for completion, beam in zip(output.outputs, searched.sequences, strict=True):
        assert beam.text is not None and beam.text.endswith("Once upon a time" + completion.text)
        assert list(completion.token_ids) == beam.tokens[len(output.prompt_token_ids) :]
        assert completion.cumulative_logprob == beam.cum_logprob and completion.finish_reason == beam.finish_reason
    both = llm.generate(["Once upon a time"] * 2, [params, GREEDY])
    assert both[0].outputs[0].text == output.outputs[0].text
    assert both[1].outputs[0].text == llm.generate("Once upon a time", GREEDY)[0].outputs[0].text


def test_a_beams_text_goes_on_after_the_prompt() -> None:
    """A SentencePiece token keeps its space, which decoding the new tokens alone would drop."""
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581a"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    found = BeamSearchOutput("1", [BeamSearchSequence([0, 1, 0], [], -1.0)], [0], prompt="a")
    assert beams_as_output(tokenizer, found).outputs[0].text == " b a"


def test_chat_shows_the_rendered_prompt(llm: LLM, picture: Image.Image, tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "Who are you?"}]
    [output] = llm.chat(conversation, sampling_params=GREEDY, use_tqdm=False)
    assert output.prompt == "<|bos|><|user|>Who are you?<|end|><|assistant|>"
    assert llm.get_tokenizer().encode(output.prompt, add_special_tokens=False) == list(output.prompt_token_ids)
    several = llm.chat(messages=[conversation] * 3, sampling_params=GREEDY, use_tqdm=True)
    assert [one.outputs[0].text for one in several] == [output.outputs[0].text] * 3
    seen = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": "Hi"}]}]
    assert llm.chat(seen, GREEDY, use_tqdm=False)[0].prompt == "<|bos|><|user|><|image|>Hi<|end|><|assistant|>"
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    custom = load_chat_template(chat_template=str(file))
    assert llm.chat(conversation, GREEDY, chat_template=custom, use_tqdm=False)[0].prompt == "Who are you?"


def test_an_llm_has_a_template_and_a_sampling(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    llm = LLM(
        str(chat_model),
        num_gpu_blocks_override=32,
        chat_template="{{ messages[0]['content'] }}",
        generation_config=str(tmp_path),
        override_generation_config={"top_k": 9},
    )
    assert llm.chat([{"role": "user", "content": "ab"}], GREEDY, use_tqdm=False)[0].prompt == "ab"
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.5, 9)
    assert dataclasses.replace(params, temperature=0.7).top_k == 9


def test_the_lora_page() -> None:
    llm = LLM(enable_lora=True, num_gpu_blocks_override=256)
    sampling_params = SamplingParams(temperature=0, max_tokens=24, stop=["[/assistant]"])
    request = LoRARequest("sql_adapter", 1, adapter_path("shout"))
    adapted = llm.generate(PROMPTS[:2], sampling_params, lora_request=request)
    plain = llm.generate(PROMPTS[:2], sampling_params)
    assert [one.outputs[0].text for one in adapted] != [one.outputs[0].text for one in plain]
    assert (request.name, request.path, request.adapter_id) == ("sql_adapter", str(adapter_path("shout")), 1)
    # Another folder under the same name, in its place.
    french = LoRARequest("sql_adapter", 1, adapter_path("french"), load_inplace=True, base_model_name="quire-demo")
    replaced = llm.generate(PROMPTS[:2], sampling_params, lora_request=french)
    assert [one.outputs[0].text for one in replaced] != [one.outputs[0].text for one in adapted]
    [info] = llm.list_lora_adapters()
    assert info.path == str(adapter_path("french"))


def test_lora_requests_have_vllms_fields() -> None:
    assert LoRARequest("a", 1, lora_local_path="x").lora_path == "x"
    assert dataclasses.replace(LoRARequest("a", 1, lora_local_path=Path("x")), load_inplace=True).lora_path == "x"
    assert LoRARequest("a", 1, "", lora_local_path="x", long_lora_max_len=None).lora_path == "x"
    assert LoRARequest("a", 1, "x", tensorizer_config_dict=None, is_3d_lora_weight=False) == LoRARequest("a", 1, "x")
    assert LoRARequest("a", 1, "x", is_3d_lora_weight=True) == LoRARequest("a", 1, "x")
    for wrong in (
        {"lora_local_path": "y"},
        {"long_lora_max_len": 8192},
        {"tensorizer_config_dict": {}},
        {"is_3d_lora_weight": 1},
        {"load_inplace": 1},
        {"base_model_name": 5},
    ):
        with pytest.raises(quire.RequestError, match=next(iter(wrong))):
            LoRARequest("a", 1, "x", **wrong)  # type: ignore[arg-type]
    with pytest.raises(quire.RequestError, match="needs lora_path"):
        LoRARequest("a", 1, load_inplace=True)


def test_the_multi_lora_example() -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256, tensor_parallel_size=1
        )
    )
    scored = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=8, stop_token_ids=[303])
    drawn = SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=8)
    waiting: list[tuple[str, SamplingParams, LoRARequest | None]] = [
        (PROMPTS[0], scored, None),
        (PROMPTS[1], drawn, None),
        (PROMPTS[2], scored, LoRARequest("sql-lora", 1, adapter_path("shout"))),
        (PROMPTS[2], scored, LoRARequest("sql-lora2", 2, adapter_path("french"))),
    ]
    finished, number = {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, sampling_params, lora_request = waiting.pop(0)
            engine.add_request(str(number), prompt, sampling_params, lora_request=lora_request)
            number += 1
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert sorted(finished) == ["0", "1", "2", "3"]
    assert finished["2"].outputs[0].text != finished["3"].outputs[0].text
    assert finished["0"].prompt_logprobs is not None


def test_the_vision_page(llm: LLM, picture: Image.Image) -> None:
    one = TextPrompt(prompt=SEEN, multi_modal_data={"image": picture})
    [alone] = llm.generate(one, GREEDY)
    batch = llm.generate([dict(one), {"prompt": SEEN, "multi_modal_data": {"image": [picture]}}], GREEDY)
    assert [output.outputs[0].text for output in batch] == [alone.outputs[0].text] * 2
    width = llm.llm_engine.executor.runner.model.embed(torch.zeros(1, dtype=torch.int64)).shape[1]
    dtype = next(llm.llm_engine.executor.runner.model.parameters()).dtype
    features = torch.randn(1, 9, width).to(dtype)  # of one image
    [tensor] = llm.generate({"prompt": SEEN, "multi_modal_data": {"image": features}}, GREEDY)
    [named] = llm.generate({"prompt": SEEN, "multi_modal_data": {"image": {"image_embeds": features[0]}}}, GREEDY)
    assert tensor.failure is None and tensor.outputs[0].text == named.outputs[0].text
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Describe these."}]}
    for _ in range(2):
        message["content"].append({"type": "image_url", "image_url": {"url": url}})
    assert llm.chat([message], GREEDY)[0].finished


def test_the_vision_examples_arguments(picture: Image.Image) -> None:
    llm = LLM(
        trust_remote_code=True,
        max_model_len=256,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 1},
        disable_mm_preprocessor_cache=False,
        enforce_eager=True,
        dtype="auto",
    )
    assert llm.generate({"prompt": SEEN, "multi_modal_data": {"image": picture}}, GREEDY)[0].finished
    with pytest.raises(quire.RequestError, match="1 are allowed"):
        llm.generate({"prompt": SEEN + SEEN, "multi_modal_data": {"image": [picture, picture]}}, GREEDY)


def test_engine_arguments_from_a_command_line(plain_model: Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="a demonstration"))
    line = ["--model", str(plain_model), "--max_num_seqs", "3", "--num-gpu-blocks-override=32", "--enforce_eager"]
    args = parser.parse_args([*line, "--tensor-parallel-size", "1", "--no-enable-prefix-caching", "--dtype", "float32"])
    assert isinstance(args, Namespace)
    made = EngineArgs.from_cli_args(args)
    assert (made.max_num_seqs, made.enforce_eager, made.enable_prefix_caching, made.quantization) == (
        3,
        True,
        False,
        None,
    )
    for llm in (LLM(**dataclasses.asdict(made)), LLM(**vars(args)), LLM.from_engine_args(made)):
        assert llm.llm_engine.config.scheduler.max_num_seqs == 3 and llm.generate("ab", GREEDY, use_tqdm=False)
    assert "secret" not in repr(EngineArgs(hf_token="secret"))
    with pytest.raises(quire.QuireError, match="data_parallel_size=2"):
        LLMEngine.from_engine_args(EngineArgs(data_parallel_size=2))
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs(max_model_length=5)


def test_metrics(plain_model: Path) -> None:
    llm = LLM(str(plain_model), num_gpu_blocks_override=32, disable_log_stats=False)
    llm.generate(["abcdefgh", "b"], GREEDY, use_tqdm=False)
    metrics = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    assert len(metrics) == len(llm.get_metrics())
    generated, blocks = metrics[("vllm:generation_tokens",)], metrics[("quire_kv_cache_blocks",)]
    assert isinstance(generated, Counter) and generated.value == 16
    assert isinstance(blocks, Gauge) and blocks.value == 32
    assert metrics[("vllm:num_requests_running",)].value == 0  # type: ignore[attr-defined]


def test_what_is_not_served_says_so(llm: LLM) -> None:
    with pytest.raises(ImportError, match="plug-in package"):
        from quire import ModelRegistry  # noqa: F401
    with pytest.raises(quire.RequestError, match="runner='pooling'"):
        llm.embed(PROMPTS)
    with pytest.raises(AttributeError, match="no 'nothing'"):
        llm.nothing()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.nothing
    assert not hasattr(llm, "collective_rpc")
