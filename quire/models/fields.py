"""Configuration fields that change the arithmetic: which there are, and the check that none of them is ignored.

A field of any of transformers' configurations whose name speaks of attention, rotation, norms, scales, biases or
activations (`WORDS`) stands in one table here: every class implements it (`EVERYWHERE`), it changes nothing (`SILENT`),
or a class has to say in `supported_fields` that it implements it, and its value is otherwise refused unless it is a
neutral one (`NEUTRAL_VALUES`, and `OTHERS` with `NEUTRAL`). A test compares the tables with the installed transformers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quire.checkpoint.plain_config import PlainConfig
from quire.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What a field's name says if it may change the arithmetic of attention, rotation, norms, scales and biases.
WORDS = re.compile(
    r"rope|rotary|attn|attention|window|sink|capping|_cap$|cap_|norm|qk|scal(e|ing)|multiplier|alibi|(^|_)bias(_|$)"
    r"|parallel|residual|layer_types|layers_block|pattern|theta|causal|softmax|bidirectional|relative|position|logit"
    r"|temperature|_eps$|epsilon|sliding|swa|nope|yarn|beta_fast|hidden_act|activation"
)
# Of training and of labels: these change no answer.
TRAINING_WORDS = re.compile(
    r"dropout|_drop$|pdrop|droppath|drop_path|drop_rate|loss|init(ializer)?_|_init|label|_token_id|token_index"
    r"|normalize_loss|normalized_loss"
)
# Too common to mean anything in a configuration whose own class does not have them: files have them as notes (Falcon3's
# "activation": "swiglu"), and transformers looks at none.
COMMON = frozenset({
    "activation", "bias", "epsilon", "norm", "norm_eps", "norm_epsilon", "norm_type", "normalization_type", "use_bias",
})  # fmt: skip
# Of names that no configuration of transformers has: those that hardly mean anything else.
_PLAIN_WORDS = re.compile(r"rope|rotary|attn|attention|sliding_window|soft_?cap|alibi|qk_")

# Every served class implements these, or is of an architecture that has other names for them.
EVERYWHERE = frozenset({
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "n_positions", "hidden_act",
    "activation_function", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
})  # fmt: skip

# These do not change what a served model answers: how it was trained, what else a call returns, which kernels run.
SILENT = frozenset({
    "attention_softmax_in_fp32", "attn_impl", "attn_implementation", "batch_norm_momentum", "classifier_activation",
    "classifier_bias", "convert_sync_batchnorm", "cross_attention_hidden_size", "deterministic_flash_attn",
    "fast_qkv", "ignore_keys_at_rope_validation", "masked_softmax_fusion", "max_window_layers", "model_parallel_size",
    "num_logits_to_keep", "offset_alibi", "output_attentions", "output_auxiliary_logits", "output_router_logits",
    "scale_attention_softmax_in_fp32", "summary_activation", "temperature", "use_flash_attention",
    "use_flash_attention_2", "use_flash_attn",
})  # fmt: skip

# Fields, with the values under which they do nothing.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "is_causal": (True, None),
    "causal": (True, None),
    "add_cross_attention": (False, None),
    "is_heterogeneous": (False, None),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "dual_chunk_attention_config": (None,),
    "position_embedding_type": (None, "absolute", "rope"),
    "no_bias": (None, True),
    **dict.fromkeys(
        ("attention_in_multiplier", "attention_out_multiplier", "attention_value_scale", "embedding_multiplier",
         "embedding_scale", "key_multiplier", "lm_head_multiplier", "logit_scale", "logits_mup_width_multiplier",
         "logits_scaling", "moe_routed_scaling_factor", "output_multiplier", "residual_multiplier", "residual_scale",
         "residual_weight", "route_scale", "routed_scaling_factor", "router_scaling_factor", "scale_emb"),
        (None, 1.0),
    ),
}  # fmt: skip

# What a field has that does nothing, if nothing else is known of it.
NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, ())

# All others that transformers' configurations have, of texts, images and sounds, and those that single families' files
# have beside them (post_norm, qk_norm, rotary_pct).
OTHERS = frozenset(
    """
    multi_query_attention norm_head original_rope rope_ratio
    _remove_final_layer_norm activation activation_sparsity_pattern adapter_attn_dim adapter_layer_norm
    adapter_layer_norm_eps adapter_reuse_layer_norm add_bias_linear add_out_norm aggregation_temperature alibi
    alibi_bias_max aligner_enable_bias altup_correct_scale apply_l2norm apply_layernorm
    apply_layernorm_after_vision_backbone apply_residual_connection_post_layernorm assign_eps attention_bias
    attention_context_left attention_context_right attention_downsample_rate attention_head_dim attention_head_size
    attention_heads attention_hidden_size attention_invalid_logits_value attention_k_eq_v attention_logit_cap
    attention_out_bias attention_ratio attention_type attention_types attention_window attention_window_size
    attn_config attn_layer_indices attn_layer_offset attn_layer_period attn_layers attn_resolutions attn_scale
    attn_temperature_tuning attn_type attn_uses_sequence_id average_logits_per_cell axial_norm_std base_attn_unit_dims
    batch_norm_eps bbox_scale bias bias_max_distance bias_symmetric block_ffn_dim_multiplier box_noise_scale
    chain_hidden_post_norm channel_attention channel_multiplier clip_qkv coarse_matching_skip_softmax
    coarse_matching_temperature compress_rope_theta conf_attention_chunk_size conf_attention_context_left
    conf_attention_context_right conf_attention_logit_cap conf_num_attention_heads conf_residual_weight
    contrastive_logits_temperature contrastive_temperature conv_activation conv_bias conv_norm_activation
    conv_pos_batch_norm conv_residual_weights conv_window convolution_bias cross_attention_frequency
    cross_attention_layers cross_attention_shape_for_attention cross_attention_widening_factor cross_attn_all_layers
    cross_attn_k cross_num_attention_heads csp_activation decoder_activation decoder_activation_function
    decoder_attention_heads decoder_bias decoder_cross_attention_heads decoder_hidden_act decoder_normalize_before
    decoder_num_attention_heads decoder_offset_scale decoder_self_attention_heads delay_pattern
    depth_decoder_activation depth_multiplier depthwise_multiplier do_layer_norm_before do_stable_layer_norm
    duration_delta_scale emb_layer_norm_before embed_dim_multiplier enable_bias enable_patch_layer_norm
    enc_attention_channels enc_res2net_scale encoder_activation_function encoder_attention_heads
    encoder_attention_type encoder_feedforward_activation encoder_hidden_act encoder_max_relative_position
    encoder_normalize_before encoder_num_attention_heads epsilon feat_extract_activation feat_extract_norm
    feat_proj_layer_norm feature_layer_norm_eps feed_forward_residual_weights ff_activation ffn_multiplier
    fine_matching_regress_temperature floor_scale focal_windows freeze_backbone_batch_norms freeze_batch_norm_2d
    full_attn_alpha_factor full_attn_beta_factor full_attn_idxs gate_soft_cap gated_attn gated_norm_rank
    gelu_activation global_attention_blocks global_attn_every_n_layers global_attn_indexes has_relative_attention_bias
    has_spatial_attention_bias hc_eps hc_sinkhorn_iters hidden_activation inference_sigma_cap keep_window_size
    kernel_qkv key_bias layer_norm_elementwise_affine layer_rope_theta layer_scale layernorm_embedding
    layers_block_type layerscale_value left_max_position_embeddings linear_attention linear_attn_alpha_factor
    linear_attn_beta_factor lm_head_bias local_attention local_attention_window_len local_attn_chunk_length
    log_scaling_alpha log_scaling_n_floor logits_soft_cap lsd_time_logit_mean lsd_time_logit_std lsh_attn_chunk_length
    mamba_conv_bias mamba_hidden_act mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mask_downsampler_hidden_act
    masked_unit_attention max_2d_position_embeddings max_decoder_position_embeddings max_encoder_position_embeddings
    max_grid_col_position_embeddings max_grid_row_position_embeddings max_logit_scale max_relative_positions
    max_source_positions max_speech_positions max_target_positions max_text_positions max_timescale
    memory_attention_downsample_rate memory_attention_feed_forward_hidden_act
    memory_attention_feed_forward_hidden_size memory_attention_hidden_size memory_attention_mlp_hidden_act
    memory_attention_mlp_hidden_size memory_attention_num_attention_heads memory_attention_num_layers
    memory_attention_rope_feat_sizes memory_attention_rope_k_sizes memory_fuser_hidden_act min_timescale
    mit_num_attention_heads mixer_rms_eps mlp_activation_function mlp_bias mlp_hidden_act mlp_layer_types
    mlp_multipliers moe_jitter_eps moe_norm_min moe_normalize_expert_weights moe_router_logit_softcapping
    moe_router_scaling_factor mtp_layer_types mtp_layers_block_type mtp_mlp_layer_types multi_modal_projector_bias
    multimodal_projector_bias n_attn_blocks n_layers_per_attn_res_block n_window n_window_infer nemo_activation
    no_rope_layer_interval noise_scale noise_scale_duration norm norm_after norm_bias norm_eps norm_epsilon norm_mean
    norm_mlp norm_reduction_force_float32 norm_rel_ebd norm_std norm_strategy norm_topk_prob norm_type
    normalization_type normalize normalize_backbone_outputs normalize_before normalize_modulator
    normalize_router_prob_before_dropping num_attention_heads_per_layer num_attention_heads_per_stage
    num_attention_layers num_cross_attention_heads num_decoder_attention_heads num_encoder_attention_heads
    num_first_full_attention_layers num_key_value_attention_heads num_last_full_attention_layers
    num_ln_in_parallel_attn num_mel_attn_blocks num_parallel_samples num_patterns num_position_embeddings
    num_qk_points num_relative_chain_bins num_relative_features num_relative_residx_bins num_residual_layers
    num_self_attention_heads num_sliding_attention_heads num_spatial_rope_pairs_per_axis num_uid_rope_pairs
    num_upscale_blocks num_windows original_max_position_embeddings out_point_positions2D output_a3_attentions
    output_logit_soft_cap parallel_attn partial_rotary_factor patch_prenorm patch_transformer_num_attention_heads
    perceiver_resampler_attention_head_dim perceiver_resampler_num_attention_heads pool_scales pooler_hidden_act
    pooling_epsilon pos_embed_rescale position_bias_max_distance position_bias_num_buckets position_biased_input
    position_bins position_buckets position_embedding_size position_embeddings_type position_id_per_seconds
    positional_embedding_temperature positional_encoding_temperature positional_encoding_type
    positionwise_conv_kernel_size post_attention_groups post_norm post_norm_eps pre_norm pred_num_attention_heads
    prefix_dense_sliding_window_pattern pretrained_window_sizes proj_bias projection_hidden_act
    projection_layer_norm_eps projector_bias projector_hidden_act projector_layernorm_eps projector_scale_factors
    projector_use_layernorm projectors_bias prompt_hidden_act prompt_num_attention_heads qk_channels qk_dim_factor
    qk_head_dim qk_l2_clip_threshold qk_layer_norms qk_layer_norms_perceiver qk_ln qk_norm qk_nope_head_dim qk_norm_type
    qk_rope_head_dim qk_scale_factor qkv_bias qkv_projection_method query_bias query_pre_attn_scalar qv_bias
    readout_activation reg_scale relation_bias_embed_dim relation_bias_scale relation_bias_theta relative_attention
    relative_attention_max_distance relative_attention_num_buckets relative_bias_args relative_max_distance
    reorder_and_upcast_attn rescale_embeddings rescale_every rescale_prenorm_residual reset_position_index_per_cell
    residual_block_indices residual_gate_temperature residual_in_fp32 residual_kernel_size
    right_max_position_embeddings rms_norm_eps_moe_gate rope_interleave rope_scaling_layers rope_theta rotary_dim
    rotary_embedding_base rotary_pct rotary_value router_bias scale scale_attn_by_inverse_layer_idx scale_attn_weights
    scale_conv_kernel_size scale_conv_kernel_sizes scale_conv_out_channels scale_depth scale_embedding scale_factor
    scale_factor_list scale_factors scale_final_hidden_sizes scale_final_input_size scale_input scale_sqrt_depth
    scaled_images_feature_dims scaled_images_overlap_ratios scaled_images_ratios scaling
    segmentation_head_activation_function self_attention_widening_factor self_attn self_attn_heads share_layernorm
    shared_expert_sink sigmoid_bias_for_mem_enc sigmoid_scale_for_mem_enc sine_position_embedding_scale
    sinkhorn_iterations sliding_window_pattern sliding_window_size sliding_windows softmax_scale
    spatial_rope_base_frequency speech_encoder_attention_heads speech_encoder_hidden_act sscp_conv_group_norm_eps
    ssm_in_multiplier ssm_multipliers ssm_out_multiplier step_scale swa_head_dim swa_num_attention_heads
    swa_num_key_value_heads swin_norm t2u_decoder_attention_heads t2u_encoder_attention_heads
    t2u_max_position_embeddings temperature_height temperature_width time_sampling_scale time_step_scale
    token_classification_bias trans_scale_factor uid_rope_base_frequency upscale use_absolute_position_embeddings
    use_attention_bias use_attention_gate use_batch_norm_in_fusion_residual use_bias use_bias_in_fusion_residual
    use_bidirectional_attention use_bottleneck_attention use_causal_conv use_conv_bias use_entity_aware_attention
    use_esm_attn_map use_expert_bias use_layer_scale use_layerscale use_learned_position_embeddings use_mem_rope
    use_mid_position_embeddings use_parallel_residual use_positional_embedding use_positional_encoding
    use_post_layernorm use_post_layernorm_in_modulation use_post_norm use_qkv_bias use_query_residual
    use_relative_position_bias use_relative_position_embeddings use_rotary_embedding use_sandwich_norm
    use_shared_attention_adapter use_shared_relative_position_bias use_sliding_window use_task_norm value_bias
    width_multiplier window_block_indices window_kernel_size window_positional_embedding_background_size window_size
    window_size_per_stage
""".split()  # noqa: SIM905 (a list of strings would be three times as long)
)


def check_fields(config: PretrainedConfig, supported: Collection[str]) -> None:
    """Refuse a field of a configuration that changes the arithmetic and is none of `supported`.

    Raises UnsupportedModelError, which names the field.
    """
    for field, neutral in NEUTRAL_VALUES.items():
        if field not in supported and getattr(config, field, neutral[0]) not in neutral:
            refuse(config, field, f"served only with {' or '.join(map(repr, neutral))}")
    if "layer_types" not in supported and set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        refuse(config, "layer_types", "every layer must be 'full_attention'")
    for field, value in vars(config).items():
        if field not in supported and value not in NEUTRAL and _is_unserved(config, field):
            refuse(config, field, "the class that serves it does not implement this, and leaving it out of account "
                   "could give wrong answers (a plug-in that does names it in supported_fields)")  # fmt: skip


def check_window(config: PretrainedConfig, supported: Collection[str]) -> None:
    """Refuse a window of no size, and none, of layers that slide; `supported` has the class's fields.

    Raises UnsupportedModelError, which names the field.
    """
    window = getattr(config, "sliding_window", None)
    if "sliding_window" not in supported or (type(window) is int and window >= 1):
        return
    if "layer_types" not in supported:
        if window is not None:
            refuse(config, "sliding_window", "it must be a whole number from 1, or null")
    elif "sliding_attention" in (config.layer_types or ()):  # Qwen2-MoE's configuration makes 0 of none
        refuse(config, "sliding_window", "layer_types has sliding layers, whose window must be a whole number from 1")


def _is_unserved(config: PretrainedConfig, field: str) -> bool:
    if field in OTHERS:
        return field not in COMMON or _is_own(type(config), field)
    if field.startswith("_") or field in EVERYWHERE or field in SILENT or field in NEUTRAL_VALUES:
        return False
    return field != "layer_types" and bool(_PLAIN_WORDS.search(field)) and not TRAINING_WORDS.search(field)


def _is_own(kind: type[PretrainedConfig], field: str) -> bool:
    """Whether a configuration class has a field of its own accord, and not because a file does."""
    if issubclass(kind, PlainConfig):
        return field in kind.own_names
    return hasattr(kind, field) or field in inspect.signature(kind.__init__).parameters


def refuse(config: PretrainedConfig, field: str, reason: str, value: Any = None) -> None:
    """Raise the error for a configuration field whose value (`value`, if the field is none of config's) is not
    served."""
    value = getattr(config, field, value)
    raise UnsupportedModelError(
        f"config.json: {field}={value!r} of a {config.model_type!r} model is not served: {reason}."
    )
