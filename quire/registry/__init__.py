"""Which class implements which Hugging Face architecture. Rows are data: nothing is imported until needed.

A package adds rows by the entry-point group `quire.models`: the entry point's name is the architecture, its
value `module:Class`, and its extras, if any, are the capabilities (`"my_models.llava:Llava [text,image]"`). A
package's row takes the place of a built-in one of the same name, and says so in the log; two packages that
claim one architecture are both refused. A package that is broken does no harm until its architecture is asked
for.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from importlib import import_module

from quire.errors import UnsupportedModelError
from quire.plugins import root_cause
from quire.registry.plugins import plugin_rows
from quire.registry.pooling import find_pooling
from quire.registry.row import IMAGES, SOUNDS, Row

logger = logging.getLogger("quire")


# What reads config.json where only the checkpoints' own code, which is never run, has a class for it.
_BAICHUAN = "quire.models.baichuan:BaichuanConfig"
_CHATGLM = "quire.models.chatglm:ChatGLMConfig"
_INTERNLM2 = "quire.models.internlm2:InternLM2Config"
_MINICPM = "quire.models.minicpm:MiniCPMConfig"
_MINICPM3 = "quire.models.minicpm3:MiniCPM3Config"
_PHI3_V = "quire.models.phi3_v:Phi3VConfig"

BUILT_IN = (
    Row("LlamaForCausalLM", "quire.models.llama:LlamaForCausalLM"),
    Row("Qwen2ForCausalLM", "quire.models.qwen2:Qwen2ForCausalLM"),
    Row("OPTForCausalLM", "quire.models.opt:OPTForCausalLM"),
    Row("GPT2LMHeadModel", "quire.models.gpt2:GPT2LMHeadModel"),
    Row("ApertusForCausalLM", "quire.models.apertus:ApertusForCausalLM"),
    Row("ArceeForCausalLM", "quire.models.arcee:ArceeForCausalLM"),
    Row("CohereForCausalLM", "quire.models.cohere:CohereForCausalLM"),
    Row("Cohere2ForCausalLM", "quire.models.cohere:Cohere2ForCausalLM"),
    Row("DeepseekV2ForCausalLM", "quire.models.deepseek_v2:DeepseekV2ForCausalLM"),
    Row("DeepseekV3ForCausalLM", "quire.models.deepseek_v3:DeepseekV3ForCausalLM"),
    Row("Ernie4_5ForCausalLM", "quire.models.ernie4_5:Ernie4_5ForCausalLM"),
    Row("Exaone4ForCausalLM", "quire.models.exaone4:Exaone4ForCausalLM"),
    Row("GemmaForCausalLM", "quire.models.gemma:GemmaForCausalLM"),
    Row("Gemma2ForCausalLM", "quire.models.gemma2:Gemma2ForCausalLM"),
    Row("Gemma3ForCausalLM", "quire.models.gemma3:Gemma3ForCausalLM"),
    Row("GlmForCausalLM", "quire.models.glm:GlmForCausalLM"),
    Row("Glm4MoeLiteForCausalLM", "quire.models.glm4_moe_lite:Glm4MoeLiteForCausalLM"),
    Row("Glm4ForCausalLM", "quire.models.glm:Glm4ForCausalLM"),
    Row("GraniteForCausalLM", "quire.models.granite:GraniteForCausalLM"),
    Row("HunYuanDenseV1ForCausalLM", "quire.models.hunyuan:HunYuanDenseV1ForCausalLM"),
    Row("MistralForCausalLM", "quire.models.mistral:MistralForCausalLM"),
    Row("Ministral3ForCausalLM", "quire.models.ministral3:Ministral3ForCausalLM"),
    Row("NemotronForCausalLM", "quire.models.nemotron:NemotronForCausalLM"),
    Row("OlmoForCausalLM", "quire.models.olmo:OlmoForCausalLM"),
    Row("Olmo2ForCausalLM", "quire.models.olmo2:Olmo2ForCausalLM"),
    Row("Olmo3ForCausalLM", "quire.models.olmo2:Olmo3ForCausalLM"),
    Row("Phi3ForCausalLM", "quire.models.phi3:Phi3ForCausalLM"),
    Row("Qwen3ForCausalLM", "quire.models.qwen3:Qwen3ForCausalLM"),
    Row("MixtralForCausalLM", "quire.models.mixtral:MixtralForCausalLM"),
    Row("Qwen2MoeForCausalLM", "quire.models.qwen2_moe:Qwen2MoeForCausalLM"),
    Row("Qwen3MoeForCausalLM", "quire.models.qwen3_moe:Qwen3MoeForCausalLM"),
    Row("OlmoeForCausalLM", "quire.models.olmoe:OlmoeForCausalLM"),
    Row("PhimoeForCausalLM", "quire.models.phimoe:PhimoeForCausalLM"),
    Row("GraniteMoeForCausalLM", "quire.models.granitemoe:GraniteMoeForCausalLM"),
    Row("GraniteMoeHybridForCausalLM", "quire.models.granitemoehybrid:GraniteMoeHybridForCausalLM"),
    Row("GptOssForCausalLM", "quire.models.gpt_oss:GptOssForCausalLM"),
    Row("Ernie4_5_MoeForCausalLM", "quire.models.ernie4_5_moe:Ernie4_5_MoeForCausalLM"),
    Row("SeedOssForCausalLM", "quire.models.seed_oss:SeedOssForCausalLM"),
    Row("SmolLM3ForCausalLM", "quire.models.smollm3:SmolLM3ForCausalLM"),
    Row("StableLmForCausalLM", "quire.models.stablelm:StableLmForCausalLM"),
    Row("BaichuanForCausalLM", "quire.models.baichuan:BaichuanForCausalLM", config=_BAICHUAN),
    Row("BaiChuanForCausalLM", "quire.models.baichuan:BaichuanForCausalLM", config=_BAICHUAN),
    Row("BloomForCausalLM", "quire.models.bloom:BloomForCausalLM"),
    Row("MptForCausalLM", "quire.models.mpt:MptForCausalLM"),
    Row("MPTForCausalLM", "quire.models.mpt:MptForCausalLM"),
    Row("ChatGLMModel", "quire.models.chatglm:ChatGLMModel", config=_CHATGLM),
    Row("ChatGLMForConditionalGeneration", "quire.models.chatglm:ChatGLMModel", config=_CHATGLM),
    Row("CodeGenForCausalLM", "quire.models.codegen:CodeGenForCausalLM"),
    Row("FalconH1ForCausalLM", "quire.models.falcon_h1:FalconH1ForCausalLM"),
    Row("FalconForCausalLM", "quire.models.falcon:FalconForCausalLM"),
    Row("GPTBigCodeForCausalLM", "quire.models.gpt_bigcode:GPTBigCodeForCausalLM"),
    Row("GPTJForCausalLM", "quire.models.gptj:GPTJForCausalLM"),
    Row("GPTNeoXForCausalLM", "quire.models.gpt_neox:GPTNeoXForCausalLM"),
    Row("PhiForCausalLM", "quire.models.phi:PhiForCausalLM"),
    Row("Starcoder2ForCausalLM", "quire.models.starcoder2:Starcoder2ForCausalLM"),
    Row("InternLM2ForCausalLM", "quire.models.internlm2:InternLM2ForCausalLM", config=_INTERNLM2),
    Row("MiniCPMForCausalLM", "quire.models.minicpm:MiniCPMForCausalLM", config=_MINICPM),
    Row("CwmForCausalLM", "quire.models.cwm:CwmForCausalLM"),
    Row("Dots1ForCausalLM", "quire.models.dots1:Dots1ForCausalLM"),
    Row("ExaoneMoeForCausalLM", "quire.models.exaone4:ExaoneMoeForCausalLM"),
    Row("FlexOlmoForCausalLM", "quire.models.flex_olmo:FlexOlmoForCausalLM"),
    Row("Glm4MoeForCausalLM", "quire.models.glm4_moe:Glm4MoeForCausalLM"),
    Row("GraniteMoeSharedForCausalLM", "quire.models.granitemoe:GraniteMoeSharedForCausalLM"),
    Row("HeliumForCausalLM", "quire.models.helium:HeliumForCausalLM"),
    Row("HunYuanMoEV1ForCausalLM", "quire.models.hunyuan_moe:HunYuanMoEV1ForCausalLM"),
    Row("Llama4ForCausalLM", "quire.models.llama4:Llama4ForCausalLM"),
    Row("Llama4ForConditionalGeneration", "quire.models.llama4:Llama4ForConditionalGeneration", text_alone=True),
    Row("MiniMaxM2ForCausalLM", "quire.models.minimax_m2:MiniMaxM2ForCausalLM"),
    Row("VaultGemmaForCausalLM", "quire.models.gemma2:VaultGemmaForCausalLM"),
    Row("MiniCPM3ForCausalLM", "quire.models.minicpm3:MiniCPM3ForCausalLM", config=_MINICPM3),
    Row("YoutuForCausalLM", "quire.models.youtu:YoutuForCausalLM"),
    Row("Idefics3ForConditionalGeneration", "quire.models.idefics3:Idefics3ForConditionalGeneration", IMAGES),
    Row("SmolVLMForConditionalGeneration", "quire.models.smolvlm:SmolVLMForConditionalGeneration", IMAGES),
    Row("LlavaForConditionalGeneration", "quire.models.llava:LlavaForConditionalGeneration", IMAGES),
    Row("LlavaNextForConditionalGeneration", "quire.models.llava_next:LlavaNextForConditionalGeneration", IMAGES),
    Row(
        "LlavaNextVideoForConditionalGeneration",
        "quire.models.llava_next_video:LlavaNextVideoForConditionalGeneration",
        IMAGES,
    ),
    Row(
        "LlavaOnevisionForConditionalGeneration",
        "quire.models.llava_onevision:LlavaOnevisionForConditionalGeneration",
        IMAGES,
    ),
    Row("Gemma3ForConditionalGeneration", "quire.models.gemma3_vision:Gemma3ForConditionalGeneration", IMAGES),
    Row("InternVLForConditionalGeneration", "quire.models.internvl:InternVLForConditionalGeneration", IMAGES),
    Row("Mistral3ForConditionalGeneration", "quire.models.mistral3:Mistral3ForConditionalGeneration", IMAGES),
    Row("PaliGemmaForConditionalGeneration", "quire.models.paligemma:PaliGemmaForConditionalGeneration", IMAGES),
    Row("Phi3VForCausalLM", "quire.models.phi3_v:Phi3VForCausalLM", IMAGES, config=_PHI3_V),
    Row("Qwen2VLForConditionalGeneration", "quire.models.qwen2_vl:Qwen2VLForConditionalGeneration", IMAGES),
    Row("Qwen2_5_VLForConditionalGeneration", "quire.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration", IMAGES),
    Row("Qwen3VLForConditionalGeneration", "quire.models.qwen3_vl:Qwen3VLForConditionalGeneration", IMAGES),
    Row("Qwen3VLMoeForConditionalGeneration", "quire.models.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration", IMAGES),
    Row("Qwen2AudioForConditionalGeneration", "quire.models.qwen2_audio:Qwen2AudioForConditionalGeneration", SOUNDS),
    Row("Glm4vForConditionalGeneration", "quire.models.glm4v:Glm4vForConditionalGeneration", IMAGES),
    Row("Glm4vMoeForConditionalGeneration", "quire.models.glm4v_moe:Glm4vMoeForConditionalGeneration", IMAGES),
)

# What runs a decoder that has no row, and others if they are asked to be run so.
FALLBACK = Row("*", "quire.models.fallback.model:TransformersForCausalLM")

# What a name tells of models that are no plain text decoders; the first match gives the reason.
_REASONS = (
    (
        r"^Molmo",
        "Molmo's image processor is code that comes with the checkpoint, which is never run, and transformers' for "
        "Molmo 2 computes with torchvision alone, which quire does without",
    ),
    (
        r"(VL|Vision|Llava|Image|Pix|Vlm|VLM|Multimodal|Omni|ForConditionalGeneration|Text2Text|BlockDiffusion|^Fuyu|^Git)",
        "it is not a text-only decoder, and quire never serves a part of a model as the whole; what sees or hears is "
        "served by a row alone (docs/models.md#image-text-models-without-a-row)",
    ),
    (
        r"For(Sequence|Token)Classification$|ForQuestionAnswering$",
        "quire generates text, it does not classify",
    ),
    (r"(?<!LMHead)Model$", "it has no language-modelling head"),
)


def rows() -> tuple[Row, ...]:
    """All rows: quire's own and those of installed packages. Imports none of their modules."""
    added = plugin_rows()
    names = {row.architecture for row in added}
    return added + tuple(row for row in BUILT_IN if row.architecture not in names)


def find(architectures: Sequence[str], impl: str = "quire") -> Row:
    """Return the row of a config.json's `architectures`. Raises UnsupportedModelError.

    Only the first name counts: serving a later one would be serving some part of the model. impl: "quire" (or "vllm",
    for who comes from there): its rows and plug-ins' alone; "transformers": `FALLBACK`; "auto": that, where there is no
    other and the name is a decoder's.
    """
    if not architectures:
        raise UnsupportedModelError(
            "config.json names no architecture, so it is not known how to run the model: name it by "
            "hf_overrides={'architectures': [...]}."
        )
    name, table = architectures[0], rows()
    found = [row for row in table if row.architecture == name]
    if impl == "transformers" or (impl == "auto" and not found and _reason(name) is None):
        return FALLBACK
    if not found:
        raise UnsupportedModelError(_unsupported(name, [row.architecture for row in table]))
    if len(found) > 1:
        claims = ", ".join(f"{row.package} ({row.target})" for row in found)
        raise UnsupportedModelError(f"{name} is claimed by several packages: {claims}. Uninstall all but one.")
    return found[0]


def resolve(architectures: Sequence[str], impl: str = "quire") -> type:
    """Return the class of a config.json's `architectures`; impl: as of `find`.

    Raises UnsupportedModelError: no row, or a class that cannot be imported, with the root cause of that.
    """
    row = find(architectures, impl)
    if row.package is not None and any(row.architecture == own.architecture for own in BUILT_IN):
        logger.warning("%s: %s of package %s takes the place of quire's own", row.architecture, row.target, row.package)
    return load_class(row)


def load_class(row: Row) -> type:
    """Import a row's class. Raises UnsupportedModelError with the root cause where that fails."""
    return _imported(row, row.target)


def config_class(architectures: Sequence[str]) -> type | None:
    """Return the class that reads the config.json of such a checkpoint; None: transformers has it, or no row has.

    Raises UnsupportedModelError for one that cannot be imported.
    """
    row = next((row for row in rows() if row.architecture in architectures[:1]), None)
    if row is None:  # a reward model's, say, of a generator's family
        pooled = find_pooling(architectures, rows())
        row = pooled.row if pooled else None
    return None if row is None or row.config is None else _imported(row, row.config)


def _imported(row: Row, target: str) -> type:
    source = f" of package {row.package!r}" if row.package else ""
    module, separator, name = target.partition(":")
    if not (module and separator and name):
        raise UnsupportedModelError(f"{row.architecture}: {target!r}{source} is not of the form 'module:Class'.")
    try:
        value = getattr(import_module(module), name)
    except Exception as error:  # whatever a module does when imported
        raise UnsupportedModelError(
            f"{row.architecture}: {target!r}{source} cannot be imported: {root_cause(error)}"
        ) from error
    if not isinstance(value, type):
        raise UnsupportedModelError(f"{row.architecture}: {target!r}{source} is not a class, but {value!r}.")
    return value


def _reason(name: str) -> str | None:
    """Why a name is no decoder's."""
    return next((text for pattern, text in _REASONS if re.search(pattern, name)), None)


def _unsupported(name: str, known: list[str]) -> str:
    reason = _reason(name) or "no row of the registry names it"
    spelled = {one.lower(): one for one in known}
    nearest = spelled[difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.0)[0]]
    return (
        f"Architecture {name!r} is not supported: {reason}. The nearest supported one is {nearest}; "
        f"all of them: {', '.join(sorted(known))}. A plug-in package can add it: see docs/adding-a-model.md."
    )


__all__ = ["BUILT_IN", "FALLBACK", "Row", "config_class", "find", "load_class", "resolve", "root_cause", "rows"]
