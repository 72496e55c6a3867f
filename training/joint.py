"""The demo's last stage: text model and vision tower joined to a LLaVA that reads on and learns to talk of pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random

import torch
from dialogues import Drill, training_document
from eyes import VisionConfig, pixels
from picture_chats import IMAGE, picture_chat
from reading import Batch, Encoded, Reading, by_length, encode, padded, weighted_loss
from stage import Pace, Stage
from tokenizers import AddedToken
from torch import nn
from transformers import (
    CLIPVisionModel,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)


@dataclass(frozen=True)
class Joint:
    """Everything that decides the last stage."""

    seed: int = 2026
    pace: Pace = Pace(steps=900, learning_rate=1.5e-3, warmup=100)  # noqa: RUF009 (it is frozen)
    documents: int = 16  # of text, per step
    pictures: int = 20  # each with a conversation, per step
    parts: int = 2  # batches of each of the two


@dataclass(frozen=True)
class Shown:
    """Conversations about one picture each; ``values`` [N, 3, image, image] has the pictures."""

    text: Batch
    values: torch.Tensor

    def weight(self) -> float:
        return self.text.weight()


def add_image_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """The last token of the vocabulary: it stands where a picture does."""
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False)], special_tokens=True)


def join(
    text: LlamaForCausalLM, tower: CLIPVisionModel, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlavaForConditionalGeneration:
    """One model of the two; between them a new projector, whose results are about as large as embeddings are."""
    torch.manual_seed(seed)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=text.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(tower.config.image_size // tower.config.patch_size) ** 2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    # Rounded as it is when it is saved by itself: then this stage may begin from there.
    model.model.language_model.load_state_dict({k: v.bfloat16().float() for k, v in text.model.state_dict().items()})
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "post_layernorm" not in name
    with torch.no_grad():
        noise = torch.randn(2, 3, tower.config.image_size, tower.config.image_size)
        found = see(model, noise)
        wanted = model.model.language_model.embed_tokens.weight[:-1]
        model.model.multi_modal_projector.linear_2.weight *= wanted.std() / found.std()
    model.model.language_model.set_attn_implementation("sdpa")
    model.model.vision_tower.set_attn_implementation("sdpa")
    return model


def see(model: LlavaForConditionalGeneration, values: torch.Tensor) -> torch.Tensor:
    """[N, 3, image, image] -> [N, patches, hidden size of the text model]."""
    tower = model.model.vision_tower
    hidden = tower.pre_layrnorm(tower.embeddings(values))
    for layer in tower.encoder.layers:
        hidden = layer(hidden, None)
    return model.model.multi_modal_projector(hidden[:, 1:])


def lessons(
    joint: Joint,
    reading: Reading,
    eyes: VisionConfig,
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> Stage:
    """The stage that trains all of the model, on text and on pictures by turns."""
    image = tokenizer.convert_tokens_to_ids(IMAGE)

    def document(rng: Random) -> Encoded:
        text = training_document(rng)
        # So that drills do not follow whatever else is plain text, they begin as nothing else does.
        return encode(Drill(f"Exercise: {text}") if isinstance(text, Drill) else text, tokenizer, reading)

    def shown(rng: Random) -> tuple[Encoded, torch.Tensor]:
        picture, chat = picture_chat(rng)
        ids, weights = encode(chat, tokenizer, reading)
        at = ids.index(image)
        ids[at : at + 1] = [image] * eyes.tokens
        weights[at : at + 1] = [0.0] * eyes.tokens
        return (ids, weights), pixels(picture.image, eyes)

    def batches(step: int) -> list[Batch | Shown]:
        rng = Random(f"joint {joint.seed} {step}")
        documents = by_length([document(rng) for _ in range(joint.documents)], joint.parts, tokenizer)
        pairs = sorted((shown(rng) for _ in range(joint.pictures)), key=lambda pair: len(pair[0][0]), reverse=True)
        size = joint.pictures // joint.parts
        groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        pictures = [
            Shown(padded([text for text, _ in group], tokenizer.pad_token_id), torch.stack([v for _, v in group]))
            for group in groups
        ]
        return [*pictures, *documents]

    def loss(batch: Batch | Shown) -> torch.Tensor:
        text = batch.text if isinstance(batch, Shown) else batch
        embeddings: nn.Module = model.model.language_model.embed_tokens
        inputs = embeddings(text.ids)
        if isinstance(batch, Shown):
            inputs = inputs.masked_scatter((text.ids == image).unsqueeze(-1), see(model, batch.values).to(inputs.dtype))
        hidden = model.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return weighted_loss(model.lm_head, hidden, text)

    recipe = {"joint": asdict(joint), "reading": asdict(reading), "eyes": asdict(eyes)}
    return Stage("joint", recipe, joint.pace, model, batches, loss, lambda batch: batch.weight())
