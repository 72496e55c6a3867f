"""The formats of families with latent attention, as `formats.py` has the others'."""

from __future__ import annotations

from tests.models.chat.format import ALONE, TALK, Case, ChatFormat

_GLM = "[gMASK]<sop><|system|>Be brief.<|user|>Is 1 < é?<|assistant|></think>Yes.<|user|>Why?<|assistant|>"
_MOONLIGHT = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")

LATENTS: dict[str, ChatFormat] = {
    "deepseek_v2": ChatFormat(
        "deepseek_v2", ("<bos>", "<eos>"), bos="<bos>", eos="<eos>",
        cases=(Case(TALK, "<bos>Be brief.\n\nUser: Is 1 < é?\n\nAssistant: Yes.<eos>User: Why?\n\nAssistant:"),),
    ),
    "moonlight": ChatFormat(
        "moonlight", _MOONLIGHT,
        cases=(
            Case(ALONE, "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|><|im_user|>user"
                 "<|im_middle|>Is 1 < é?<|im_end|><|im_assistant|>assistant<|im_middle|>"),
            Case(TALK[:2], "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Is 1 < é?"
                 "<|im_end|>", {"add_generation_prompt": False}),
        ),
    ),
    "glm4_7": ChatFormat(
        "glm4_7", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"),
        stored="files",
        cases=(
            Case(TALK, _GLM + "<think>"),
            Case(TALK, _GLM + "</think>", {"template_kwargs": {"enable_thinking": False}}),
        ),
    ),
}  # fmt: skip
