"""ChatGLM2, ChatGLM3 and the first GLM-4, whose classes are code of the checkpoints'."""

from tests.models.rows.oracles import chatglm
from tests.models.rows.row import VOCAB, ModelRow

AUTO_MAP = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
}
BASE = {
    "padded_vocab_size": VOCAB, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 3, "num_attention_heads": 4,
    "kv_channels": 8, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 128,
    "layernorm_epsilon": 1e-5, "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True, "original_rope": True,
    "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "fp32_residual_connection": False,
    "post_layer_norm": True, "tie_word_embeddings": False, "auto_map": AUTO_MAP,
}  # fmt: skip

ROWS = (
    ModelRow(
        "ChatGLMModel",
        "LlamaConfig",
        base=BASE,
        variants={
            "chatglm3_6b": {},
            "chatglm3_6b_32k": {"rope_ratio": 50},
            "glm4_9b": {"rope_ratio": 500, "layernorm_epsilon": 1.5625e-07, "num_attention_heads": 8},
            "other_head_size": {"kv_channels": 16},
            "one_group": {"multi_query_group_num": 1},
            "biases": {"add_bias_linear": True},
            "no_bias": {"add_qkv_bias": False},
        },
        quick=("chatglm3_6b", "glm4_9b"),
        linears=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        saved=("final_layernorm",),
        embedding="word_embeddings",
        head="output_layer",
        aliases=("ChatGLMForConditionalGeneration",),
        oracle=chatglm,
    ),
)
