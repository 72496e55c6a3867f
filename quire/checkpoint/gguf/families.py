"""What each general.architecture of a GGUF file is in transformers; see `family.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.checkpoint.gguf.family import Family
from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.latent import minicpm3, with_latents
from quire.checkpoint.gguf.ministral import mistral3
from quire.checkpoint.gguf.states import falcon_h1, granite_hybrid
from quire.errors import UnsupportedModelError

_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# Experts whose choice has a correction, and others beside that all tokens go through.
_CORRECTED = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_CLASSIC = {
    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner", "attention.head_count": "n_head", "attention.head_count_kv": "",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_TANH_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
# How scores become experts' weights: 1 softmax, 2 logistic functions, 3 softmax of those that are taken.
_SOFTMAX, _LOGISTIC = {"expert_gating_func": (0, 1)}, {"expert_gating_func": (0, 2)}
_RENORMALISED = {"expert_weights_norm": (True,)}
_TURNED = {"rope.scaling.finetuned": (True,)}  # False: nothing is turned
_PARALLEL = {"use_parallel_residual": (False, True)}  # llama.cpp computes it so, and does not read the key
_Q, _OUT, _GATE = "attn_q.bias", "attn_output.bias", "ffn_gate.bias"
_QUERY_NORM = "attn_q_norm.weight"


def _llama(file: GgufFile) -> Mapping[str, Any]:
    """Mixtral's files say llama, too. A Mistral's do not say its window, and llama.cpp has none there."""
    if not file.number("expert_count", 0, least=0):
        return {}
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def _gemma2(file: GgufFile) -> Mapping[str, Any]:
    """Of one size, scores are scaled by the hidden size's share of a head, as llama.cpp knows it; and so it does the
    numbers of files that are older than their keys."""
    return {
        "query_pre_attn_scalar": file.number("embedding_length") // file.heads[0] if file.layers == 46 else _dim(file),
        "sliding_window": file.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.real("final_logit_softcapping", 30.0), **_layer_types(file, every=2),
    }  # fmt: skip


def _gemma3(file: GgufFile) -> Mapping[str, Any]:
    scalar = file.number("embedding_length") // file.heads[0] if file.layers == 62 else _dim(file)
    types = _layer_types(file, every=6)
    if not file.number("attention.sliding_window", 0, least=0):
        types = {"layer_types": ["full_attention"] * file.layers}
    local = file.real("rope.freq_base_swa", 10000.0)
    theta = file.real("rope.freq_base", 1e6)
    return {"query_pre_attn_scalar": scalar, "rope_local_base_freq": local, "rope_theta": theta, **types}


def _dim(file: GgufFile) -> int:
    return file.head_dim


def _phi3(file: GgufFile) -> Mapping[str, Any]:
    """Files that are older than the key for windows are told by their context, as llama.cpp does it."""
    context = file.number("context_length")
    window = file.number("attention.sliding_window", 2047 if context == 4096 else 0, least=0)
    more: dict[str, Any] = {"sliding_window": window or None}
    if file.says("rope.scaling.original_context_length"):
        more["original_max_position_embeddings"] = file.number("rope.scaling.original_context_length")
    return more


def _falcon(file: GgufFile) -> Mapping[str, Any]:
    """Of 7B, all heads of queries have one key. The others have groups, and two norms or one.

    A Falcon-RW, of which each head has a key of its own and layers have biases, has ALiBi, and its feed-forward behind
    the attention: no key says either, so what may be one is refused.
    """
    groups, two = _groups(file), file.has("attn_norm_2.weight")
    biases = any(name.endswith(("attn_qkv.bias", "ffn_up.bias", "attn_output.bias")) for name in file.tensors)
    if biases or (groups == file.heads[0] > 1 and not two):
        why = "its layers have biases" if biases else "each of its heads has a key of its own"
        raise UnsupportedModelError(
            f"{file.name}: {why}, as of Falcon-RW, whose positions are ALiBi's: a GGUF file does not say which it has. "
            "Take the model's safetensors."
        )
    more: dict[str, Any] = {"num_kv_heads": groups, "new_decoder_architecture": two or groups > 1}
    if groups > 1 or two:
        more["num_ln_in_parallel_attn"] = 2 if two else 1
    return {**more, "multi_query": True, "ffn_hidden_size": file.rows("ffn_up.weight")}


def _gpt_neox(file: GgufFile) -> Mapping[str, Any]:
    share = file.number("rope.dimension_count", file.head_dim) / file.head_dim
    return {"rotary_pct": share, "rotary_emb_base": file.real("rope.freq_base", 10000.0)}


def _olmo2(file: GgufFile) -> Mapping[str, Any]:
    if not file.number("attention.sliding_window", 0, least=0):
        return {}
    windows = _layer_types(file, every=4)
    return {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], **windows,
        "sliding_window": file.number("attention.sliding_window"),
    }  # fmt: skip


def _layer_types(file: GgufFile, every: int) -> dict[str, Any]:
    """By the key, or else windows in all layers but every so-maniest."""
    pattern = file.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        if len(pattern) < file.layers:
            raise UnsupportedModelError(
                f"{file.name}: attention.sliding_window_pattern does not say it of every layer."
            )
        slides = [bool(one) for one in pattern[: file.layers]]
    else:
        every = file.number("attention.sliding_window_pattern", every, least=0)
        slides = [not every or (number + 1) % every != 0 for number in range(file.layers)]
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in slides]}


def _exaone4(file: GgufFile) -> Mapping[str, Any]:
    if not file.number("attention.sliding_window", 0, least=0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * file.layers}
    return _layer_types(file, every=4)


def _exaone_moe(file: GgufFile) -> Mapping[str, Any]:
    dense = file.dense_layers
    kinds = ["dense" if number < dense else "sparse" for number in range(file.layers)]
    windows = {"sliding_window": file.number("attention.sliding_window"), **_layer_types(file, every=4)}
    return {**windows, "mlp_layer_types": kinds, **_chosen(file)}


def _chosen(file: GgufFile) -> dict[str, Any]:
    """What is done to the weights of experts; a class's defaults are published models'."""
    return {
        "norm_topk_prob": file.flag("expert_weights_norm", False),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0) or 1.0,
        "n_group": file.number("expert_group_count", 1, least=0) or 1,
        "topk_group": file.number("expert_group_used_count", 1, least=0) or 1,
    }


def _granite(file: GgufFile) -> Mapping[str, Any]:
    """A multiplier that is not there, or 0, is none."""
    found = {name: file.real(key, 1.0) or 1.0 for key, name in _MULTIPLIERS.items()}
    scale = file.real("attention.scale", 0.0) or file.head_dim**-0.5
    return {**found, "attention_multiplier": scale, "logits_scaling": file.real("logit_scale")}


def _granite_moe(file: GgufFile) -> Mapping[str, Any]:
    if not file.number("expert_shared_feed_forward_length", 0, least=0):
        return _granite(file)
    return {**_granite(file), "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}


def _corrected(file: GgufFile) -> Mapping[str, Any]:
    return {**_chosen(file), "first_k_dense_replace": file.dense_layers}


def _mpt(file: GgufFile) -> Mapping[str, Any]:
    alibi, clip = file.real("attention.max_alibi_bias", 0.0), file.real("attention.clamp_kqv", 0.0) or None
    if alibi < 1 or alibi != int(alibi):
        raise UnsupportedModelError(
            f"{file.name}: attention.max_alibi_bias is {alibi:g}, and whole numbers from 1 on are served: an MPT "
            "without ALiBi has learned positions."
        )
    config = {"alibi": True, "alibi_bias_max": int(alibi), "clip_qkv": clip}
    ratio = file.rows("ffn_up.weight") // file.number("embedding_length")
    return {"attn_config": config, "expansion_ratio": ratio}


def _baichuan(file: GgufFile) -> Mapping[str, Any]:
    """Of 13B, which alone has 40 layers, positions are ALiBi's. Rows of the output are as they are to be used."""
    alibi = 8.0 if file.layers == 40 else 0.0
    if file.real("attention.max_alibi_bias", alibi) != alibi:
        raise UnsupportedModelError(f"{file.name}: attention.max_alibi_bias is served with {alibi:g} alone.")
    return {"alibi": alibi > 0, "norm_head": False}


def _minicpm(file: GgufFile) -> Mapping[str, Any]:
    """Without the keys, which old files do not have, the numbers are the published models'."""
    layers, hidden = file.layers, file.number("embedding_length")
    depth = file.real("residual_scale", 1.4 / layers**0.5) * layers**0.5
    base = hidden / (file.real("logit_scale", hidden / 256) or 1.0)
    return {"scale_emb": file.real("embedding_scale", 12.0), "scale_depth": depth, "dim_model_base": base}


def _inner(file: GgufFile) -> Mapping[str, Any]:
    """llama.cpp's converter says four times the hidden size, whatever it is."""
    return {"n_inner": file.rows("ffn_up.weight")}


def _groups(file: GgufFile) -> int:
    return file.number("attention.head_count_kv", file.heads[0])


def _minimax_m2(file: GgufFile) -> Mapping[str, Any]:
    dense = file.number("feed_forward_length", 0, least=0)
    inner = file.number("expert_feed_forward_length", dense or None)
    return {"rotary_dim": file.number("rope.dimension_count", file.head_dim), "intermediate_size": inner}


def _hunyuan_moe(file: GgufFile) -> Mapping[str, Any]:
    return {"moe_topk": file.number("expert_used_count"), "intermediate_size": file.number("feed_forward_length")}


def _sees(file: GgufFile) -> Mapping[str, Any]:
    """Of a text model: three positions of a token are one, and nothing is added behind layers, where nothing is
    seen."""
    file.asked.add("rope.dimension_sections")
    if file.architecture != "qwen2vl":
        file.asked.add("n_deepstack_layers")
    return {}


_GLM = {"attention_bias": _Q}

# Families that are known by name and not read -> why.
REFUSED: Mapping[str, str] = MappingProxyType({
    "phimoe": "by what its rotations are multiplied (short_mscale, long_mscale), and how near to the best an expert "
              "must be (router_jitter_noise), no key says",
    "llama4": "whether its queries and keys have norms, and how many tokens a chunk has, no key says",
})  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family("llama", "LlamaForCausalLM", _LOCAL_EXPERTS, {"hidden_act": "silu"},
                    {"attention_bias": _Q, "mlp_bias": _GATE}, _llama, facts={**_SOFTMAX, **_RENORMALISED}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM",
                       {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size",
                        "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
                       {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1}, {"qkv_bias": _Q},
                       facts=_SOFTMAX),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", present={"attention_bias": _Q}),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM",
                       {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
                       {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
                       {"attention_bias": _Q}, facts={**_SOFTMAX, **_RENORMALISED}),
    "gemma": Family("gemma", "GemmaForCausalLM", fixed=_TANH_GELU, present={"attention_bias": _Q}),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", {}, _TANH_GELU, {"attention_bias": _Q}, _gemma2),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", {**_WINDOW, **_SOFT_CAPS}, _TANH_GELU,
                     {"attention_bias": _Q}, _gemma3,
                     facts={"rope.local.freq_base": (10000.0,), "rope.global.freq_base": (1e6,)}),
    "phi2": Family("phi", "PhiForCausalLM", _LAYER_NORM, {"hidden_act": "gelu_new"}, {"qk_layernorm": _QUERY_NORM},
                   lambda file: {"intermediate_size": file.rows("ffn_up.weight")}, turns_partly=True, facts=_PARALLEL),
    "phi3": Family("phi3", "Phi3ForCausalLM", more=_phi3, turns_partly=True),
    "falcon": Family("falcon", "FalconForCausalLM",
                     {"attention.layer_norm_epsilon": "layer_norm_epsilon", "attention.head_count_kv": "",
                      "feed_forward_length": ""},
                     {"alibi": False, "parallel_attn": True}, {"bias": "attn_qkv.bias"}, _falcon, facts=_PARALLEL),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", _CLASSIC, {"activation_function": "gelu_new"}, {}, _inner, False),
    "gptneox": Family("gpt_neox", "GPTNeoXForCausalLM",
                      {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual", "attention.head_count_kv": ""},
                      {"hidden_act": "gelu"}, {"attention_bias": "attn_qkv.bias"}, _gpt_neox, rotates=False),
    "starcoder": Family("gpt_bigcode", "GPTBigCodeForCausalLM", _CLASSIC, {"activation_function": "gelu"}, {},
                        lambda file: {**_inner(file), "multi_query": _groups(file) == 1}, False),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", {"attention.layer_norm_epsilon": "norm_epsilon"},
                         {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}, {"use_bias": _Q}),
    "stablelm": Family("stablelm", "StableLmForCausalLM",
                       {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"}, {"hidden_act": "silu"},
                       {"use_qkv_bias": _Q, "qk_layernorm": _QUERY_NORM}, turns_partly=True),
    "olmo": Family("olmo", "OlmoForCausalLM", {"attention.layer_norm_rms_epsilon": ""},
                   present={"attention_bias": _Q},
                   more=lambda file: {"clip_qkv": file.real("attention.clamp_kqv", 0.0) or None},
                   facts={"attention.layer_norm_epsilon": (1e-5,)}),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", present={"attention_bias": _Q}, more=_olmo2),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", _EXPERTS, {"norm_topk_prob": False}, {"attention_bias": _Q},
                    facts=_SOFTMAX),
    "command-r": Family("cohere", "CohereForCausalLM", _LAYER_NORM, {},
                        {"use_qk_norm": _QUERY_NORM, "attention_bias": _Q},
                        lambda file: {"logit_scale": file.real("logit_scale", 1.0) or 1.0}, facts=_PARALLEL),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", _LAYER_NORM, {}, {"attention_bias": _Q},
                      lambda file: {"sliding_window": file.number("attention.sliding_window"),
                                    "logit_scale": file.real("logit_scale"), **_layer_types(file, every=4)},
                      facts=_PARALLEL),
    "granite": Family("granite", "GraniteForCausalLM", {}, {}, {"attention_bias": _Q, "mlp_bias": _GATE}, _granite,
                      facts=_TURNED),
    "granitemoe": Family("granitemoe", "GraniteMoeForCausalLM",
                         {**_LOCAL_EXPERTS, "expert_shared_feed_forward_length": "shared_intermediate_size"}, {},
                         {"attention_bias": _Q}, _granite_moe, facts={**_TURNED, **_SOFTMAX, **_RENORMALISED}),
    "deepseek2": Family("deepseek_v2", "DeepseekV2ForCausalLM", {**_CORRECTED, "attention.key_length": ""},
                        more=with_latents, rotates=False),
    "minicpm3": Family("minicpm3", "MiniCPM3ForCausalLM", {"attention.key_length": ""}, more=minicpm3, rotates=False),
    "chatglm": Family("glm", "GlmForCausalLM", {}, {}, {"attention_bias": _Q},
                      lambda file: {"attention_bias": file.has(_Q) or file.has("attn_qkv.bias"),
                                    "head_dim": file.head_dim}, turns_partly=True),
    "glm4": Family("glm4", "Glm4ForCausalLM", present=_GLM,
                   more=lambda file: {"head_dim": file.head_dim}, turns_partly=True),
    "glm4moe": Family("glm4_moe", "Glm4MoeForCausalLM", _CORRECTED, {},
                      {"attention_bias": _Q, "use_qk_norm": _QUERY_NORM}, _corrected, turns_partly=True,
                      facts=_LOGISTIC),
    "dots1": Family("dots1", "Dots1ForCausalLM", _CORRECTED, {"sliding_window": None}, {"attention_bias": _Q},
                    _corrected, facts=_LOGISTIC),
    "bloom": Family("bloom", "BloomForCausalLM",
                    {"block_count": "n_layer", "context_length": "seq_length", "attention.head_count": "n_head",
                     "feed_forward_length": "", "attention.head_count_kv": "",
                     "attention.layer_norm_epsilon": "layer_norm_epsilon"}, rotates=False,
                    facts={"attention.max_alibi_bias": (8.0,)}),
    "mpt": Family("mpt", "MptForCausalLM",
                  {"block_count": "n_layers", "context_length": "max_seq_len", "embedding_length": "d_model",
                   "attention.head_count": "n_heads", "feed_forward_length": "", "attention.head_count_kv": "",
                   "attention.layer_norm_epsilon": "layer_norm_epsilon"}, more=_mpt, rotates=False),
    "nemotron": Family("nemotron", "NemotronForCausalLM", {"attention.layer_norm_epsilon": "norm_eps"},
                       {"hidden_act": "relu2"}, {"attention_bias": _Q, "mlp_bias": "ffn_up.bias"}, turns_partly=True),
    "exaone4": Family("exaone4", "Exaone4ForCausalLM", _WINDOW, more=_exaone4),
    "exaone-moe": Family("exaone_moe", "ExaoneMoeForCausalLM",
                         {**_CORRECTED, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts"},
                         more=_exaone_moe, facts=_LOGISTIC),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", present={"use_bias": _Q},
                       more=lambda file: {"head_dim": file.head_dim}),
    "ernie4_5-moe": Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
                           {"expert_count": "moe_num_experts", "expert_used_count": "moe_k",
                            "expert_feed_forward_length": "moe_intermediate_size",
                            "expert_shared_count": "moe_num_shared_experts",
                            "leading_dense_block_count": "moe_layer_start_index",
                            "interleave_moe_layer_step": "moe_layer_interval"}, {}, {"use_bias": _Q},
                           facts={**_SOFTMAX, **_RENORMALISED}),
    "hunyuan-dense": Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", present={"attention_bias": _Q}),
    "hunyuan-moe": Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {"expert_count": "num_experts"}, {},
                          {"attention_bias": _Q}, _hunyuan_moe,
                          facts={**_SOFTMAX, **_RENORMALISED, "expert_shared_count": (1,)}),
    "internlm2": Family("internlm2", "InternLM2ForCausalLM", {"attention.key_length": ""}, present={"bias": _Q}),
    "baichuan": Family("baichuan", "BaichuanForCausalLM", {"attention.head_count_kv": "", "attention.key_length": ""},
                       more=_baichuan),
    "minicpm": Family("minicpm", "MiniCPMForCausalLM", {"attention.key_length": ""}, present={"attention_bias": _Q},
                      more=_minicpm),
    "minimax-m2": Family("minimax_m2", "MiniMaxM2ForCausalLM", _LOCAL_EXPERTS, {"use_qk_norm": True},
                         more=_minimax_m2, facts={**_LOGISTIC, **_RENORMALISED}),
    "arcee": Family("arcee", "ArceeForCausalLM", {}, {"hidden_act": "relu2"},
                    {"attention_bias": _Q, "mlp_bias": "ffn_up.bias"}),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", {}, {"no_rope_layer_interval": 4, "use_sliding_window": False},
                      {"attention_bias": _Q, "mlp_bias": _GATE}),
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM",
                       present={"attention_bias": _Q, "attention_out_bias": _OUT, "mlp_bias": _GATE}),
    "gpt-oss": Family("gpt_oss", "GptOssForCausalLM",
                      {**_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"}, {},
                      {"attention_bias": _Q},
                      lambda file: {"sliding_window": file.number("attention.sliding_window"),
                                    **_layer_types(file, every=2)}, facts={"expert_gating_func": (0, 3)}),
    "apertus": Family("apertus", "ApertusForCausalLM", {}, {"hidden_act": "xielu"}, {"attention_bias": _Q}),
    "mistral3": Family("mistral", "MistralForCausalLM", {}, {"sliding_window": None}, more=mistral3),
    "granitehybrid": Family("granitemoehybrid", "GraniteMoeHybridForCausalLM",
                            {"attention.head_count_kv": "", "attention.key_length": ""},
                            more=lambda file: {**_granite(file), **granite_hybrid(file)},
                            facts={**_SOFTMAX, **_RENORMALISED}),
    "falcon-h1": Family("falcon_h1", "FalconH1ForCausalLM", {}, {},
                        {"attention_bias": _Q, "mlp_bias": _GATE}, falcon_h1),
    "qwen2vl": Family("qwen2", "Qwen2ForCausalLM", more=_sees),
    "qwen3vl": Family("qwen3", "Qwen3ForCausalLM", present={"attention_bias": _Q}, more=_sees),
    "qwen3vlmoe": Family("qwen3_moe", "Qwen3MoeForCausalLM",
                         {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
                         {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
                         {"attention_bias": _Q}, _sees, facts={**_SOFTMAX, **_RENORMALISED}),
})  # fmt: skip
