"""vLLM's arguments and flags: those that quire has, those that it takes, as they ask for nothing else than what is
done, and those that it refuses, and why. docs/from-vllm.md is made of this; `quire.config.from_vllm` reads it.

The names are those of vLLM 0.32 (`EngineArgs`, `LLM` and `serve`), and those of 0.6.6 that are gone since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.settings import SETTINGS

Status = Literal["served", "accepted", "refused"]
Door = Literal["LLM", "serve"]

BOTH: tuple[Door, ...] = ("LLM", "serve")
_LLM: tuple[Door, ...] = ("LLM",)
_SERVE: tuple[Door, ...] = ("serve",)


class _Anything:
    """Stands for all values."""


ANYTHING = _Anything()


@dataclass(frozen=True)
class Name:
    """One name at some doors.

    values: what is taken beside None, which asks for nothing; ANYTHING: all. Of a name that is served, what is taken is
    up to its setting. why: for a name that is accepted, what quire does; for one that is refused, the rest of
    "name=value: ...".
    """

    name: str
    status: Status
    doors: tuple[Door, ...]
    values: tuple[Any, ...] = ()
    why: str = ""
    switch: bool = False

    def takes(self, value: Any) -> bool:
        if value is None or ANYTHING in self.values:
            return True
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)


# Settings of `LLM()` that vLLM has for its server alone.
_OF_SERVER_THERE = frozenset({"tool_call_parser"})


def _served() -> Iterator[Name]:
    """The settings that vLLM has too."""
    for row in SETTINGS:
        if row.vllm_name is not None:
            doors = _SERVE if row.vllm_name in _OF_SERVER_THERE else BOTH
            yield Name(row.vllm_name, "served", tuple(door for door in doors if door in row.doors))
    yield Name("config", "served", _SERVE)  # the file of settings


def _accepted(doors: tuple[Door, ...], why: str, **names: tuple[Any, ...]) -> Iterator[Name]:
    for name, values in names.items():
        switch = _is_switch(values) or (ANYTHING in values and name.startswith(_SWITCHES))
        yield Name(name, "accepted", doors, values, why, switch)


def _refused(doors: tuple[Door, ...], why: str, **names: tuple[Any, ...]) -> Iterator[Name]:
    for name, values in names.items():
        yield Name(name, "refused", doors, values, why, _is_switch(values))


def _is_switch(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, bool) for value in values)


# Names of switches of which any value is taken.
_SWITCHES = (
    "enable_", "disable_", "fully_", "specialize_", "use_v2", "use_tqdm", "multi_step", "async_", "skip_", "log_error",
)  # fmt: skip

_ANY = (ANYTHING,)
_OFF, _ON = (False,), (True,)
_NONE: tuple[Any, ...] = ()

# Of structured_outputs_config: which engine is to do it, in vLLM's names for some.
_SHAPES = ({}, *({"backend": name} for name in ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")))

_ONE = "one process computes, on one device"
_QUANTISED = (
    "what quantized files hold they say themselves (config.json), and `quantization` makes int8 or int4 of others"
)
_POOLING = "runner, convert and pooler_config say what a model is for"
_FORMATS = "a package adds formats by the entry points {}"
_DRAFTS = "speculative_config has what there is to say about draft tokens"
_TRACES = "nothing is sent anywhere; /metrics and get_metrics() have the numbers"
_OWN_CODE = "no code is loaded by options; a plug-in package can add a model (docs/adding-a-model.md)"
_COMPILE = "quire compiles nothing: its kernels are compiled when it is installed, and steps are recorded"
_KERNELS = "quire has its own kernels, and takes those that the machine can run; QUIRE_ISA and QUIRE_KERNELS choose"
_WEIGHTS = "weights stay where the model computes; nothing is moved there and back"
_TRANSFER = "KV blocks are not sent between engines"
_MAMBA = "models with state-space layers are not served"
_VIDEO = "no features of a video are left out"
_EXPERTS = "experts are not spread over devices"
_ONE_SCHEDULE = (
    "there is one schedule, first come first served in chunks; max_num_seqs and max_num_batched_tokens bound a step"
)
_PROMPT_ADAPTERS = "prompt adapters are not served; LoRA adapters are"
_LOGGED = "each request has a line with its model, tokens and seconds; prompts, parameters and answers are never logged"
_GRPC = "the server speaks HTTP alone"
_MEDIA_CACHE = "media_cache_bytes bounds what is kept of images"

_ENGINE = (
    *_accepted(_LLM, "it names nothing in a program", served_model_name=_ANY),
    *_accepted(_LLM, "requests of `LLM` end with their call", shutdown_timeout=_ANY),
    *_refused(_LLM, "set the level of Python's logger 'quire'", log_level=_NONE),
    *_refused(_SERVE, "the server makes text of tokens", skip_tokenizer_init=_OFF),
    # What is done anyway.
    *_accepted(BOTH, _ONE, data_parallel_size=(1,)),
    *_accepted(BOTH, _POOLING, task=("generate", "auto")),
    *_accepted(BOTH, "prompts are always computed in chunks; answers do not depend on them",
              enable_chunked_prefill=_ON),
    *_accepted(BOTH, "adapters are used in the model's dtype", lora_dtype=("auto",)),
    *_accepted(BOTH, "nothing is logged from time to time; /metrics and get_metrics() have the numbers",
               disable_log_stats=_ANY),
    *_accepted(BOTH, "the tokenizer is transformers', the fast one where there is one", tokenizer_mode=("auto", "hf")),
    *_accepted(BOTH, "config.json is read through transformers", config_format=("auto", "hf")),
    *_accepted(BOTH, _ONE_SCHEDULE, scheduling_policy=("fcfs",), scheduler_delay_factor=(0,), num_scheduler_steps=(1,),
               stream_interval=(1,)),
    *_accepted(BOTH, "on a GPU the next step is planned while one runs, and answers do not depend on it",
               async_scheduling=_ANY, disable_async_output_proc=_ANY, multi_step_stream_outputs=_ANY),
    *_accepted(BOTH, "steps of any length are recorded", max_seq_len_to_capture=_ANY),
    *_accepted(_LLM, "sleep() and wake_up() are always there", enable_sleep_mode=_ANY),
    *_accepted(BOTH, "biases of adapters are always served", enable_lora_bias=_ANY),
    *_accepted(BOTH, "adapters on tower and projector are always served", enable_tower_connector_lora=_ANY),
    *_accepted(BOTH, "an adapter has as many trained tokens as it brings", lora_extra_vocab_size=_ANY),
    *_accepted(BOTH, "each adapter is computed at its own rank, whatever the batch holds", specialize_active_lora=_ANY),
    *_accepted(BOTH, "with one device nothing is sharded or reduced", fully_sharded_loras=_ANY,
               disable_custom_all_reduce=_ANY, disable_nccl_for_dp_synchronization=_ANY),
    *_accepted(BOTH, "there is one block manager", use_v2_block_manager=_ANY, disable_hybrid_kv_cache_manager=_ANY),
    *_accepted(BOTH, "there is no cascade attention", disable_cascade_attn=_ANY),
    *_accepted(BOTH, "weights are read where they lie, without copies beside them", max_parallel_loading_workers=_ANY),
    *_accepted(BOTH, "loading shows no bar", use_tqdm_on_load=_ANY),
    *_accepted(BOTH, "no images are made up to measure memory but on a GPU", skip_mm_profiling=_ANY),
    *_accepted(BOTH, _COMPILE, optimization_level=_ANY),
    *_accepted(BOTH, "features of images can always be given as image_embeds", enable_mm_embeds=_ANY),
    *_accepted(BOTH, "logprobs are the model's own, before penalties and temperature", logprobs_mode=("raw_logprobs",)),
    *_accepted(BOTH, "nothing leaves the machine", master_addr=("127.0.0.1",), master_port=_ANY),
    # What is not done.
    *_refused(BOTH, _ONE, nnodes=(1,), node_rank=(0,), prefill_context_parallel_size=(1,),
              decode_context_parallel_size=(1,), distributed_timeout_seconds=_NONE,
              cpu_distributed_timeout_seconds=_NONE,
              numa_bind=_OFF, numa_bind_nodes=_NONE, numa_bind_cpus=_NONE, dcp_comm_backend=_NONE, dcp_q_replicate=_OFF,
              dcp_kv_cache_interleave_size=(1,), cp_kv_cache_interleave_size=(1,), data_parallel_rank=(0,),
              data_parallel_start_rank=(0,), data_parallel_size_local=(1,), data_parallel_address=_NONE,
              data_parallel_rpc_port=_NONE, data_parallel_hybrid_lb=_OFF, data_parallel_external_lb=_OFF,
              data_parallel_multi_port_external_lb=_OFF, data_parallel_backend=("mp",), enable_hc_sp=_OFF,
              enable_batch_sharded_sampling=_OFF, dp_sync_interval=(16,), worker_use_ray=_OFF,
              ray_workers_use_nsight=_OFF, enable_fault_tolerance=_OFF, fault_tolerance_config=({},),
              _api_process_count=(1,), _api_process_rank=(0,), enable_shm_tensor_arena=_OFF,
              prefill_schedule_interval=(1,), enable_nccl_comm_suspend=_OFF),
    *_refused(BOTH, "device names the one device: cpu, cuda or cuda:1", device_ids=_NONE),
    *_refused(BOTH, _EXPERTS, enable_expert_parallel=_OFF, enable_ep_weight_filter=_OFF, moe_backend=("auto",),
              all2all_backend=("allgather_reducescatter",), enable_elastic_ep=_OFF, elastic_ep_max_dp_size=_NONE,
              enable_dbo=_OFF, ubatch_size=(0,), dbo_decode_token_threshold=(32,), dbo_prefill_token_threshold=(512,),
              eplb_config=({},), enable_eplb=_OFF, expert_placement_strategy=("linear",),
              enable_return_routed_experts=_OFF, enable_mixed_moe_lora_format=_OFF, enable_moe_shared_loras=_OFF),
    *_refused(BOTH, _KERNELS, linear_backend=("auto",), sparse_indexer_topk_backend=("auto",), attention_backend=_NONE,
              attention_config=({},), kernel_config=({},), ir_op_priority=({},), enable_flashinfer_autotune=_OFF,
              mm_encoder_attn_backend=_NONE, gdn_prefill_backend=_NONE, kda_prefill_backend=_NONE,
              kda_decode_backend=_NONE, use_fp64_gumbel=_OFF),
    *_refused(BOTH, _COMPILE, compilation_config=(0, {}), cudagraph_capture_sizes=_NONE,
              max_cudagraph_capture_size=_NONE,
              cudagraph_metrics=_OFF, jit_monitor_mode=("warn",), jit_monitor_verbose=_OFF),
    *_refused(BOTH, _QUANTISED, quantization_config=_NONE, allow_deprecated_quantization=_OFF,
              quantization_param_path=_NONE, mm_encoder_fp8_scale_path=_NONE,
              mm_encoder_fp8_scale_save_path=_NONE, mm_encoder_fp8_scale_save_margin=(1.5,),
              mm_encoder_attn_dtype=_NONE,
              qlora_adapter_name_or_path=_NONE),
    *_refused(BOTH, _WEIGHTS, cpu_offload_gb=(0,), offload_backend=("auto",), cpu_offload_params=([], set()),
              offload_group_size=(0,), offload_num_in_group=(1,), offload_prefetch_step=(1,), offload_params=([],
              set())),
    *_refused(BOTH, "say it in pooler_config", override_pooler_config=_NONE),
    *_refused(BOTH, "adapters have heads of the model's labels, see docs/adapters.md", max_lora_cls_labels=_NONE),
    *_accepted(BOTH, "one engine serves all shapes, llguidance", guided_decoding_backend=_ANY),
    *_refused(BOTH, "one engine serves all shapes, llguidance; what else there is to say requests say",
              structured_outputs_config=_SHAPES),
    *_refused(BOTH, _FORMATS.format("quire.reasoning_parsers"), reasoning_parser_plugin=("",)),
    *_refused(BOTH, "a format of reasoning says by which texts it begins and ends", reasoning_config=_NONE),
    *_refused(BOTH, _DRAFTS, spec_method=_NONE, spec_model=_NONE, spec_tokens=_NONE,
              per_request_spec_decode_metrics=("none",), speculative_model=_NONE, num_speculative_tokens=_NONE,
              speculative_model_quantization=_NONE, speculative_draft_tensor_parallel_size=_NONE,
              speculative_disable_mqa_scorer=_OFF, speculative_max_model_len=_NONE,
              speculative_disable_by_batch_size=_NONE, ngram_prompt_lookup_max=_NONE, ngram_prompt_lookup_min=_NONE,
              spec_decoding_acceptance_method=("rejection_sampler",),
              typical_acceptance_sampler_posterior_threshold=_NONE,
              typical_acceptance_sampler_posterior_alpha=_NONE, disable_logprobs_during_spec_decoding=_OFF,
              num_lookahead_slots=(0,)),
    *_refused(BOTH, _OWN_CODE, worker_cls=("auto",), worker_extension_cls=("",), scheduler_cls=_NONE,
              model_class_overrides=({},), io_processor_plugin=_NONE, additional_config=({},),
              code_revision=_NONE, override_neuron_config=_NONE),
    *_refused(BOTH, _TRACES, otlp_traces_endpoint=_NONE, collect_detailed_traces=_NONE, enable_trace_replay=_OFF,
              show_hidden_metrics_for_version=_NONE, kv_cache_metrics=_OFF, kv_cache_metrics_sample=(0.01,),
              custom_histogram_buckets=_NONE, enable_layerwise_nvtx_tracing=_OFF, enable_mfu_metrics=_OFF,
              enable_logging_iteration_details=_OFF, enable_mm_processor_stats=_OFF, profiler_config=({},),
              aggregate_engine_logging=_OFF),
    *_refused(BOTH, "--log-format and --log-level say how the server logs; in a program it is Python's logger 'quire'",
              logging_config=_NONE, log_config_file=_NONE),
    *_refused(BOTH, _TRANSFER, kv_events_config=_NONE, ec_transfer_config=_NONE,
              ec_manager_config=({},), kv_offloading_size=_NONE, kv_offloading_backend=("native",),
              aux_output_config=({},),
              engram_config=_NONE, tokens_only=_OFF),
    *_refused(BOTH, _MAMBA, mamba_config=({},), mamba_cache_dtype=("auto",), mamba_ssm_cache_dtype=("auto",),
              mamba_block_size=_NONE, mamba_cache_mode=("none",), enable_mamba_shared_prefix_checkpoint=_OFF,
              replayssm_buffer_len=(16,), use_replayssm=_OFF, mamba_backend=("triton",), mamba_ssu_algorithm=_NONE,
              enable_mamba_cache_stochastic_rounding=_OFF, mamba_cache_philox_rounds=(0,)),
    *_refused(BOTH, _VIDEO, video_pruning_rate=_NONE, video_pruning_method=("evs",)),
    *_refused(BOTH, _MEDIA_CACHE, mm_processor_cache_gb=(4,), mm_processor_cache_type=("lru",),
              mm_shm_cache_max_object_size_mb=(128,), mm_ipc_gpu_memory_gb=(0,), disable_mm_preprocessor_cache=_OFF,
              mm_hasher_algorithm=("blake3",), mm_tensor_ipc=("direct_rpc",)),
    *_refused(BOTH, "images are read by threads of the engine and encoded where the model computes",
              mm_encoder_only=_OFF, mm_encoder_tp_mode=("weights",), mm_processor_device=("auto", "cpu"),
              mm_device_do_normalize=_ON, renderer_num_workers=(1,), tokenizer_pool_size=(0,),
              tokenizer_pool_type=("ray",), tokenizer_pool_extra_config=_NONE),
    *_refused(BOTH, "a model is never served without its eyes", language_model_only=_OFF),
    *_refused(BOTH, "images stand where the template, or the prompt, has their marker", interleave_mm_strings=_OFF),
    *_refused(BOTH, "an adapter is named by the request that wants it", default_mm_loras=_NONE),
    *_refused(BOTH, "an adapter is served whole or not at all", lora_target_modules=_NONE),
    *_refused(BOTH, "adapters that stretch the context are not served", long_lora_scaling_factors=_NONE),
    *_refused(BOTH, _PROMPT_ADAPTERS, enable_prompt_adapter=_OFF, max_prompt_adapters=(1,),
              max_prompt_adapter_token=(0,)),
    *_refused(BOTH, _ONE_SCHEDULE, max_num_scheduled_tokens=_NONE, long_prefill_token_threshold=(0,),
              long_prefill_token_threshold_adaptive=_OFF, max_num_active_seqs=_NONE, disable_chunked_mm_input=_OFF,
              scheduler_reserve_full_isl=_ON, watermark=(0.0,), performance_mode=("balanced",)),
    *_refused(BOTH, "--max-queue bounds the sequences that wait", max_num_queued_reqs=_NONE,
              max_num_queued_tokens=_NONE),
    *_refused(BOTH, "swap_space says how much is kept in main memory; with 0 all is computed anew",
              preemption_mode=_NONE),
    *_refused(BOTH, "all layers keep keys and values in one dtype", kv_cache_dtype_skip_layers=([],)),
    *_refused(BOTH, "the prefix cache keeps blocks of block_size tokens as long as there is room",
              prefix_caching_hash_algo=("sha256",), prefix_cache_retention_interval=(0,), prefix_match_unit=_NONE,
              kv_sharing_fast_prefill=_OFF, swa_bounded_replay=_ON),
    *_refused(BOTH, "a sliding window is served as the checkpoint has it, or refused", disable_sliding_window=_OFF),
    *_refused(BOTH, "say it in hf_overrides, as {'rope_theta': ...}", rope_scaling=_NONE, rope_theta=_NONE),
    *_refused(BOTH, "config.json comes with the model", hf_config_path=_NONE),
    *_refused(BOTH, "weights come with the model", model_weights=("",), weight_transfer_config=_NONE),
    *_refused(BOTH, "of a hub's repository quire fetches what it needs and no more", ignore_patterns=([],
              "original/**/*", ["original/**/*"])),
    *_refused(BOTH, "load_format has no further settings", model_loader_extra_config=({},),
              pt_load_map_location=("cpu",), safetensors_load_strategy=("lazy",),
              safetensors_prefetch_num_threads=_NONE,
              safetensors_prefetch_block_size=_NONE),
    *_refused(BOTH, "it is not returned", return_sampling_mask=_OFF),
    *_refused(BOTH, "memory is PyTorch's, and sleep() frees all weights", sleep_mode_offload_cudagraph=_OFF,
              sleep_preserve_parameter_names=([],), enable_cumem_allocator=_OFF),
    *_refused(BOTH, "texts are not marked", watermark_config=_NONE),
    *_refused(BOTH, "texts are generated token by token, in order", diffusion_config=_NONE),
    *_refused(BOTH, "variables that no option has are warned of", fail_on_environ_validation=_OFF),
    *_refused(BOTH, "logits_processors are not served", logits_processor_pattern=_NONE),
)  # fmt: skip

_SERVER = (
    *_accepted(_SERVE, _LOGGED, disable_log_requests=_ANY, max_log_len=_ANY, enable_log_requests=_OFF,
               enable_log_outputs=_OFF, enable_log_deltas=_ANY),
    *_accepted(_SERVE, "which form of content a template takes is found out", chat_template_content_format=("auto",)),
    *_accepted(_SERVE, "usage always has prompt_tokens_details", enable_prompt_tokens_details=_ANY),
    *_accepted(_SERVE, "/load is always there", enable_server_load_tracking=_ANY),
    *_accepted(_SERVE, "/tokenizer_info is always there, behind the key", enable_tokenizer_info_endpoint=_ANY),
    *_accepted(_SERVE, "every answer has X-Request-Id", enable_request_id_headers=_ANY),
    *_accepted(_SERVE, "requests may bring mm_processor_kwargs; the size that results is checked first",
               trust_request_mm_kwargs=_ON),
    *_accepted(_SERVE, "an error of the server's own is in its log with its traceback", log_error_stack=_ANY),
    *_accepted(_SERVE, _ONE, api_server_count=(1,), disable_frontend_multiprocessing=_ANY),
    *_accepted(_SERVE, "routes take GET and POST, and any header", allowed_methods=(["*"],), allowed_headers=(["*"],)),
    *_accepted(_SERVE, "probes are not logged unless asked for", disable_access_log_for_endpoints=(
        "/health", "/metrics", "/ready", "/ping", "/health,/metrics", "/metrics,/health", "/health,/metrics,/ping")),
    *_refused(_SERVE, "templates come from the model, or from --chat-template; never in requests",
              trust_request_chat_template=_OFF),
    *_refused(_SERVE, "requests have it as chat_template_kwargs", default_chat_template_kwargs=({},)),
    *_refused(_SERVE, "requests ask for it as return_tokens_as_token_ids", return_tokens_as_token_ids=_OFF),
    *_accepted(_SERVE, "calls are read wherever it is known how the model writes them", enable_auto_tool_choice=_ANY),
    *_refused(_SERVE, _FORMATS.format("quire.tool_parsers"), tool_parser_plugin=("",)),
    *_refused(_SERVE, "--tool-strict says whether calls match their tools' schemas", tool_strict_level=("auto",)),
    *_refused(_SERVE, "tools are run by who sent them", tool_server=_NONE),
    *_refused(_SERVE, "requests ask for it as stream_options.include_usage", enable_force_include_usage=_OFF),
    *_refused(_SERVE, "/metrics has the times, of all requests together", enable_per_request_metrics=_OFF),
    *_refused(_SERVE, "streams have no lines to keep them open", sse_keep_alive_interval=(0,)),
    *_refused(_SERVE, "Cohere's /v2/rerank alone is there", cohere_is_reasoning_model=_ON, cohere_format=("cmd4",)),
    *_refused(
        _SERVE, "thinking that is disabled in /v1/messages is off", anthropic_disabled_thinking_effort=("auto",)
    ),
    *_refused(_SERVE, "system_fingerprint is quire's version", fingerprint_mode=("full", "hash"),
              fingerprint_value=_NONE),
    *_refused(_SERVE, _ONE, headless=_OFF, enable_scale_out=_OFF, data_parallel_supervisor_port=(9256,),
              dp_supervisor_probe_interval_s=(5.0,), dp_supervisor_probe_timeout_s=(5.0,),
              dp_supervisor_probe_failure_threshold=(3,)),
    *_refused(_SERVE, _GRPC, grpc=_OFF, grpc_port=_NONE),
    *_refused(_SERVE, "web pages call without cookies", allow_credentials=_OFF),
    *_refused(_SERVE, "put a proxy in front that asks for client certificates, or renews the server's",
              ssl_ca_certs=_NONE, ssl_cert_reqs=(0,), ssl_ciphers=_NONE, enable_ssl_refresh=_OFF),
    *_refused(_SERVE, _OWN_CODE, middleware=([],)),
    *_refused(_SERVE, "there are no pages, but /openapi.json is always there", disable_fastapi_docs=_OFF,
              enable_offline_docs=_OFF),
    *_refused(_SERVE, "a header has 64 KiB at most", h11_max_incomplete_event_size=(4 << 20,),
              h11_max_header_count=(256,)),
    *_refused(_SERVE, "late interaction is computed of the vectors of all tokens, in one way",
              enable_flash_late_interaction=_ON),
    *_refused(_SERVE, _PROMPT_ADAPTERS, prompt_adapters=_NONE),
)  # fmt: skip

NAMES: tuple[Name, ...] = (*_served(), *_ENGINE, *_SERVER)

# vLLM's short flags, of names that `quire serve` does not have itself.
SHORT = {
    "data_parallel_size": "-dp", "nnodes": "-n",
    "node_rank": "-r", "enable_expert_parallel": "-ep", "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp", "compilation_config": "-cc",
    "attention_config": "-ac", "diffusion_config": "-dc", "api_server_count": "-asc", "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl", "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb", "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe", "data_parallel_multi_port_external_lb": "-dpm",
}  # fmt: skip
