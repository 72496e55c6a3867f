"""The arguments of `LLM()` as types, for editors and mypy. `python -m quire.config.write` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class EngineArguments(TypedDict, total=False):
    """What an engine is made with."""

    tokenizer: str | None
    revision: str | None
    tokenizer_revision: str | None
    dtype: str | None
    quantization: str | None
    load_format: str | None
    model_impl: str | None
    runner: str | None
    convert: str | None
    pooler_config: Mapping[str, Any] | None
    device: str | None
    exact_products: bool | None
    max_model_len: int | None
    skip_tokenizer_init: bool | None
    enforce_eager: bool | None
    download_dir: str | None
    hf_token: bool | str | None
    hf_overrides: Mapping[str, Any] | None
    trust_remote_code: bool | None
    seed: int | None
    max_logprobs: int | None
    logits_processors: Sequence[Any] | None
    enable_lora: bool | None
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    lora_device_bytes: int | None
    lora_host_bytes: int | None
    lora_roots: Sequence[str] | None
    limit_mm_per_prompt: Mapping[str, int] | None
    enable_prompt_embeds: bool | None
    mm_processor_kwargs: Mapping[str, Any] | None
    media_io_kwargs: Mapping[str, Mapping[str, Any]] | None
    allowed_local_media_path: str | None
    allowed_media_domains: Sequence[str] | None
    media_fetch_timeout: float | None
    max_image_bytes: int | None
    max_image_pixels: int | None
    max_image_seconds: float | None
    max_video_bytes: int | None
    max_video_duration: float | None
    max_video_frames: int | None
    max_video_pixels: int | None
    max_video_seconds: float | None
    max_audio_bytes: int | None
    max_audio_duration: float | None
    max_audio_seconds: float | None
    media_cache_bytes: int | None
    media_file_bytes: int | None
    block_size: int | None
    kv_cache_dtype: str | None
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float | None
    swap_space: float | None
    enable_prefix_caching: bool | None
    kv_transfer_config: Mapping[str, Any] | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    speculative_config: Mapping[str, Any] | None
    executor: str | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    distributed_executor_backend: str | None
    ray_worker_cpus: int | None
    debug: bool | None


class LLMArguments(EngineArguments, total=False):
    """What `LLM` takes: vLLM's arguments come last, those of which some value is taken."""

    chat_template: str | Path | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    tool_strict: bool | None
    generation_config: str | None
    override_generation_config: Mapping[str, Any] | None
    _api_process_count: Any
    _api_process_rank: Any
    additional_config: Any
    aggregate_engine_logging: Any
    all2all_backend: Any
    allow_deprecated_quantization: Any
    async_scheduling: Any
    attention_config: Any
    aux_output_config: Any
    compilation_config: Any
    config_format: Any
    cp_kv_cache_interleave_size: Any
    cpu_offload_gb: Any
    cpu_offload_params: Any
    cudagraph_metrics: Any
    data_parallel_backend: Any
    data_parallel_external_lb: Any
    data_parallel_hybrid_lb: Any
    data_parallel_multi_port_external_lb: Any
    data_parallel_rank: Any
    data_parallel_size: Any
    data_parallel_size_local: Any
    data_parallel_start_rank: Any
    dbo_decode_token_threshold: Any
    dbo_prefill_token_threshold: Any
    dcp_kv_cache_interleave_size: Any
    dcp_q_replicate: Any
    decode_context_parallel_size: Any
    disable_async_output_proc: Any
    disable_cascade_attn: Any
    disable_chunked_mm_input: Any
    disable_custom_all_reduce: Any
    disable_hybrid_kv_cache_manager: Any
    disable_log_stats: Any
    disable_logprobs_during_spec_decoding: Any
    disable_mm_preprocessor_cache: Any
    disable_nccl_for_dp_synchronization: Any
    disable_sliding_window: Any
    dp_sync_interval: Any
    ec_manager_config: Any
    enable_batch_sharded_sampling: Any
    enable_chunked_prefill: Any
    enable_cumem_allocator: Any
    enable_dbo: Any
    enable_elastic_ep: Any
    enable_ep_weight_filter: Any
    enable_eplb: Any
    enable_expert_parallel: Any
    enable_fault_tolerance: Any
    enable_flashinfer_autotune: Any
    enable_hc_sp: Any
    enable_layerwise_nvtx_tracing: Any
    enable_logging_iteration_details: Any
    enable_lora_bias: Any
    enable_mamba_cache_stochastic_rounding: Any
    enable_mamba_shared_prefix_checkpoint: Any
    enable_mfu_metrics: Any
    enable_mixed_moe_lora_format: Any
    enable_mm_embeds: Any
    enable_mm_processor_stats: Any
    enable_moe_shared_loras: Any
    enable_nccl_comm_suspend: Any
    enable_prompt_adapter: Any
    enable_return_routed_experts: Any
    enable_shm_tensor_arena: Any
    enable_sleep_mode: Any
    enable_tower_connector_lora: Any
    enable_trace_replay: Any
    eplb_config: Any
    expert_placement_strategy: Any
    fail_on_environ_validation: Any
    fault_tolerance_config: Any
    fully_sharded_loras: Any
    guided_decoding_backend: Any
    ignore_patterns: Any
    interleave_mm_strings: Any
    ir_op_priority: Any
    jit_monitor_mode: Any
    jit_monitor_verbose: Any
    kernel_config: Any
    kv_cache_dtype_skip_layers: Any
    kv_cache_metrics: Any
    kv_cache_metrics_sample: Any
    kv_offloading_backend: Any
    kv_sharing_fast_prefill: Any
    language_model_only: Any
    linear_backend: Any
    logprobs_mode: Any
    long_prefill_token_threshold: Any
    long_prefill_token_threshold_adaptive: Any
    lora_dtype: Any
    lora_extra_vocab_size: Any
    mamba_backend: Any
    mamba_cache_dtype: Any
    mamba_cache_mode: Any
    mamba_cache_philox_rounds: Any
    mamba_config: Any
    mamba_ssm_cache_dtype: Any
    master_addr: Any
    master_port: Any
    max_parallel_loading_workers: Any
    max_prompt_adapter_token: Any
    max_prompt_adapters: Any
    max_seq_len_to_capture: Any
    mm_device_do_normalize: Any
    mm_encoder_fp8_scale_save_margin: Any
    mm_encoder_only: Any
    mm_encoder_tp_mode: Any
    mm_hasher_algorithm: Any
    mm_ipc_gpu_memory_gb: Any
    mm_processor_cache_gb: Any
    mm_processor_cache_type: Any
    mm_processor_device: Any
    mm_shm_cache_max_object_size_mb: Any
    mm_tensor_ipc: Any
    model_class_overrides: Any
    model_loader_extra_config: Any
    model_weights: Any
    moe_backend: Any
    multi_step_stream_outputs: Any
    nnodes: Any
    node_rank: Any
    num_lookahead_slots: Any
    num_scheduler_steps: Any
    numa_bind: Any
    offload_backend: Any
    offload_group_size: Any
    offload_num_in_group: Any
    offload_params: Any
    offload_prefetch_step: Any
    optimization_level: Any
    per_request_spec_decode_metrics: Any
    performance_mode: Any
    prefill_context_parallel_size: Any
    prefill_schedule_interval: Any
    prefix_cache_retention_interval: Any
    prefix_caching_hash_algo: Any
    profiler_config: Any
    pt_load_map_location: Any
    ray_workers_use_nsight: Any
    reasoning_parser_plugin: Any
    renderer_num_workers: Any
    replayssm_buffer_len: Any
    return_sampling_mask: Any
    safetensors_load_strategy: Any
    scheduler_delay_factor: Any
    scheduler_reserve_full_isl: Any
    scheduling_policy: Any
    served_model_name: Any
    shutdown_timeout: Any
    skip_mm_profiling: Any
    sleep_mode_offload_cudagraph: Any
    sleep_preserve_parameter_names: Any
    sparse_indexer_topk_backend: Any
    spec_decoding_acceptance_method: Any
    specialize_active_lora: Any
    speculative_disable_mqa_scorer: Any
    stream_interval: Any
    structured_outputs_config: Any
    swa_bounded_replay: Any
    task: Any
    tokenizer_mode: Any
    tokenizer_pool_size: Any
    tokenizer_pool_type: Any
    tokens_only: Any
    ubatch_size: Any
    use_fp64_gumbel: Any
    use_replayssm: Any
    use_tqdm_on_load: Any
    use_v2_block_manager: Any
    video_pruning_method: Any
    watermark: Any
    worker_cls: Any
    worker_extension_cls: Any
    worker_use_ray: Any
