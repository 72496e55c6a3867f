"""What an adapter was trained for (PEFT's task_type), beside what the model is loaded to do."""

from __future__ import annotations

from collections.abc import Collection

from quire.errors import AdapterError
from quire.models.base import CausalLM
from quire.models.pooling.base import PoolingModel

# Heads that PEFT saves with an adapter of such a task, whether the configuration names them or not: those that the
# model has, of both.
HEADS = ("classifier", "score")
CLASSES = ("SEQ_CLS", "TOKEN_CLS")
_TRAINED_FOR = {
    "SEQ_CLS": "to classify texts",
    "TOKEN_CLS": "to classify tokens",
    "FEATURE_EXTRACTION": "for vectors of texts",
    "QUESTION_ANS": "to find answers in a text",
    "SEQ_2_SEQ_LM": "to turn one text into another",
}
_LOAD = {
    "SEQ_CLS": "a base whose architecture is named *ForSequenceClassification serves it",
    "TOKEN_CLS": "a base whose architecture is named *ForTokenClassification serves it",
    "FEATURE_EXTRACTION": "load the base with runner='pooling' and convert='embed'",
}
_NOT_SERVED = "no such task is served"


def check_task(task: str | None, model: CausalLM, where: str) -> None:
    """Raise AdapterError for an adapter whose head, or whose hidden states, are of no use to what the model does.

    task: as the configuration has it. One of a generator (CAUSAL_LM), or of no task, may change any model's layers.
    """
    if task not in _TRAINED_FOR or task in _fitting(model):
        return
    raise AdapterError(
        f"{where}: task_type={task}: it was trained {_TRAINED_FOR[task]}, and this model {_does(model)}: "
        f"{_LOAD.get(task, _NOT_SERVED)}."
    )


def check_head(saved: Collection[str], model: CausalLM, where: str) -> None:
    """Raise AdapterError for an adapter without the head that the base model has not. saved: parameters that it
    brings, by the model's own names."""
    absent = model.head_absent.difference(saved) if isinstance(model, PoolingModel) else ()
    if absent:
        raise AdapterError(
            f"{where}: the base model's files have no {', '.join(sorted(absent))}, and the adapter does not bring all "
            "of them (modules_to_save): there is nothing to give classes with."
        )


def _does(model: CausalLM) -> str:
    if not isinstance(model, PoolingModel):
        return "generates"
    if model.convert == "embed":
        return "makes vectors of texts"
    return f"classifies {'tokens' if model.per_token else 'texts'}"


def _fitting(model: CausalLM) -> tuple[str, ...]:
    if not isinstance(model, PoolingModel):
        return ("FEATURE_EXTRACTION", "SEQ_2_SEQ_LM")  # which names of modules tell from those that fit
    if model.convert == "embed":
        return ("FEATURE_EXTRACTION",)
    if model.convert == "reward":
        return CLASSES
    return ("TOKEN_CLS",) if model.per_token else ("SEQ_CLS",)
