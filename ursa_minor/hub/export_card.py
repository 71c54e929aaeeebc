"""Write the model card of an export: the README.md in its folder.

The text is export_card.jinja. The description is Markdown of the author. Every other name and text
passes through ``escaped`` or ``code_block``, so that it cannot break the card.
"""

import json
import math
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData, constants
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact
from ursa_minor.base.shell import ollama_name, path_word
from ursa_minor.data.tokens.tokenizer import Encoder, decode, decode_continuation, encode_prompt
from ursa_minor.evaluation import sampling
from ursa_minor.evaluation.likelihood import context_length
from ursa_minor.hub import client
from ursa_minor.hub.model_card import (
    CARD_BASELINES,
    CARD_LOSSES,
    DEFAULT_PROMPT,
    MAX_EXAMPLE_TOKENS,
    MODEL_ID,
    architecture_label,
    baselines_of,
    code_block,
    describe_data,
    escaped,
    measured_at,
    measurements_of,
    metadata,
)
from ursa_minor.hub.origin import Origin, TrainingRun, public_file_name
from ursa_minor.recipe import keys

EXPORT_TEMPLATE = Path(__file__).with_name("export_card.jinja")
# Metadata of the card of the exported model that also apply to the export.
KEPT_METADATA = ("language", "license", "license_name", "license_link", "datasets", "base_model")
MAX_SAMPLE_TOKENS = 100
# For a model without a run: the defaults of generate.py.
DEFAULT_SAMPLING = sampling.Sampling(
    max_new_tokens=MAX_SAMPLE_TOKENS, temperature=0.8, top_k=200, top_p=1.0, seed=1337
)
MAX_PROMPT_WORDS = 3  # of a prompt that the model has generated itself
MAX_PROMPT_CHARACTERS = 30
# The first message of the example conversation, by language. A chat model knows few questions, but
# often a greeting. In other languages it is the prompt of the run.
GREETINGS = {
    "ar": "مرحبا!",
    "bn": "নমস্কার!",
    "de": "Hallo!",
    "el": "Γεια σου!",
    "en": "Hello!",
    "es": "¡Hola!",
    "fa": "سلام!",
    "fr": "Bonjour !",
    "hi": "नमस्ते",
    "id": "Halo!",
    "it": "Ciao!",
    "ja": "こんにちは",
    "ko": "안녕하세요!",
    "nl": "Hallo!",
    "pl": "Cześć!",
    "pt": "Olá!",
    "ru": "Привет!",
    "ta": "வணக்கம்!",
    "th": "สวัสดี",
    "tr": "Merhaba!",
    "uk": "Привіт!",
    "vi": "Xin chào!",
    "zh": "你好!",
}
DEFAULT_MESSAGE = GREETINGS["en"]  # without a language and a prompt
NOT_VALIDATED = "The metadata of the model card were not validated"
VALIDATION_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Export:
    """An exported model, and how it was exported.

    Attributes:
        name: name of the exported folder.
        origin: the run or model that was exported.
        dtype: fp32, bf16, fp16 or int8.
        prune: share of the weights that were set to zero.
        gguf: precision of the GGUF file, or None if there is none.
        description: text of the author about the model, in Markdown, or an empty string.
        has_chat_template: whether the export has a chat template.
        can_chat: whether the model was also trained on chats.
        loss_before: loss of the exported model in nats per token, or None if not measured.
        loss_after: loss of the export.
        measured_on: the files of the losses, or empty for the validation split of the run.
    """

    name: str
    origin: Origin
    dtype: str
    prune: float
    gguf: str | None
    description: str
    has_chat_template: bool
    can_chat: bool
    loss_before: float | None
    loss_after: float | None
    measured_on: Sequence[str]

    @property
    def changes_weights(self) -> bool:
        """Whether the export computes other values than the exported model."""
        return self.dtype != "fp32" or self.prune > 0


class Sample(NamedTuple):
    """A text that the exported model has generated.

    Attributes:
        prompt: the prompt, or the message of a user.
        text: the text after it, or the answer. None if the model cannot continue the prompt.
    """

    prompt: str
    text: str | None


def export_card(export: Export, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the README.md of an export.

    Args:
        model: the exported model, with which a sample is generated.
        tokenizer: tokenizer of the exported model.
    """
    settings = _sampling_settings(export.origin)
    generate = _converse if export.can_chat else _continue_prompt
    sample = generate(export.origin, model, tokenizer, settings)
    results = _result_rows(export.origin.run)
    context = context_length(model.config)
    card = ModelCard.from_template(
        _metadata(export),
        template_path=str(EXPORT_TEMPLATE),
        escaped=escaped,
        code_block=code_block,
        quoted=path_word,
        ollama_name=ollama_name,
        export=export,
        description=redact(export.description).strip(),
        introduction=_introduction(export, model),
        training=_training_rows(export.origin.run),
        results=results,
        has_baselines=any(label in results for label in CARD_BASELINES.values()),
        format=_describe_format(export),
        sample=sample,
        settings=settings,
        prompt=json.dumps(sample.prompt, ensure_ascii=False),
        shell_prompt=shlex.quote(sample.prompt),
        folder=json.dumps(export.name, ensure_ascii=False),
        context=context,
        max_new_tokens=min(MAX_EXAMPLE_TOKENS, (context or math.inf) // 2),
    )
    # A name of a file may contain bytes that are not UTF-8.
    text = str(card).rstrip() + "\n"
    return text.encode(errors="replace").decode()


def find_problem(card_text: str) -> str | None:
    """Let the Hub validate the metadata of a card.

    Returns:
        A sentence that says why the Hub rejects the card or why it was not validated, or None.
    """
    if constants.HF_HUB_OFFLINE:
        return f"{NOT_VALIDATED}, because HF_HUB_OFFLINE is set"
    problems: list[str | None] = []

    def validate() -> None:
        problems.append(_validate(card_text))

    # A thread, because the lookup of a host name has no timeout.
    thread = threading.Thread(target=validate, daemon=True)
    thread.start()
    thread.join(VALIDATION_SECONDS)
    if not problems:
        return f"{NOT_VALIDATED}, because the Hub did not answer in {VALIDATION_SECONDS:g} seconds"
    return problems[0]


def _validate(card_text: str) -> str | None:
    """See ``find_problem``."""
    client.api()  # sets timeouts and turns off warnings
    try:
        ModelCard(card_text).validate()
    except ValueError as error:
        return (
            f"The Hub rejects the metadata of the model card ({client.describe(error)}). Correct "
            f"the value that this error names before you upload the card"
        )
    except Exception as error:  # each layer of the client has its own exception classes
        return f"{NOT_VALIDATED}, because the Hub cannot be reached ({client.describe(error)})"
    return None


def missing_metadata(card_text: str) -> list[str]:
    """Return which of license and language a card does not state."""
    data = ModelCard(card_text).data
    missing = []
    if data.license in (None, "unknown"):
        missing.append("license")
    if not data.language:
        missing.append("language")
    return missing


def _metadata(export: Export) -> ModelCardData:
    """Return the metadata of a card.

    Results of the run are included only if they apply to the exported weights.
    """
    origin = export.origin
    if origin.run is None:
        known = _known_metadata(origin.metadata)
        if origin.hub_id:
            known["base_model"] = origin.hub_id
        data = ModelCardData(
            pipeline_tag="text-generation", library_name="transformers", tags=[], **known
        )
    else:
        run = origin.run
        measurements = []
        if not origin.is_base and not export.changes_weights:
            measurements = measured_at(
                list(measurements_of(run.rows_until_saved, run.step)), {run.step, run.last_step}
            )
        data = metadata(run.recipe, export.name, measurements)
        if origin.is_base:
            data.base_model = origin.hub_id or data.base_model
    assert isinstance(data.tags, list)
    if export.gguf:
        data.tags.append("gguf")
    data.tags = data.tags or None
    return data


def _known_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``KEPT_METADATA`` that have the type that the Hub requires."""
    known = {}
    for name in KEPT_METADATA:
        value = values.get(name)
        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, str) for item in items):
            known[name] = value
    return known


def _sampling_settings(origin: Origin) -> sampling.Sampling:
    """Return the settings of the samples of a run, or the default ones."""
    if origin.run is None:
        return DEFAULT_SAMPLING
    evaluation = origin.run.recipe.evaluation
    return sampling.Sampling(
        max_new_tokens=min(evaluation.sample_tokens, MAX_SAMPLE_TOKENS),
        temperature=evaluation.sample_temperature,
        top_k=evaluation.sample_top_k,
        top_p=evaluation.sample_top_p,
        seed=origin.run.recipe.model.seed,
    )


def _continue_prompt(
    origin: Origin,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: sampling.Sampling,
) -> Sample:
    """Continue the prompt of the run, or else a beginning that the model has generated itself."""
    prompt = origin.run.prompt if origin.run else None
    try:
        prompt = prompt or _own_beginning(model, tokenizer, settings) or DEFAULT_PROMPT
        prompt_ids = encode_prompt(tokenizer, prompt)
        new_ids = sampling.sample(model, prompt_ids, tokenizer, settings)
    except BadInput:  # the tokenizer lacks a character, or the logits are not finite
        return Sample(prompt or DEFAULT_PROMPT, None)
    text = decode_continuation(tokenizer, prompt_ids, new_ids)
    return Sample(decode(tokenizer, prompt_ids) or prompt, text)


def _own_beginning(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: sampling.Sampling
) -> str:
    """Return the first words of a document that the model generates."""
    ids = sampling.sample(model, encode_prompt(tokenizer, ""), tokenizer, settings)
    words = decode(tokenizer, ids).split()
    beginning = " ".join(words[:MAX_PROMPT_WORDS])
    return beginning[:MAX_PROMPT_CHARACTERS]


def _converse(
    origin: Origin,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: sampling.Sampling,
) -> Sample:
    """Answer a greeting with the most likely tokens."""
    message = _first_message(origin)
    chat = [{"role": "user", "content": message}]
    try:
        Encoder(tokenizer)([message])
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        prompt_ids = encoded["input_ids"]
        greedy = sampling.Sampling(
            max_new_tokens=settings.max_new_tokens, temperature=0, top_k=0, top_p=1.0, seed=0
        )
        new_ids = sampling.sample(model, prompt_ids, tokenizer, greedy)
    except BadInput:
        return Sample(message, None)
    return Sample(message, decode_continuation(tokenizer, prompt_ids, new_ids))


def _first_message(origin: Origin) -> str:
    """Return the message of the user in the example conversation."""
    if origin.run is None:
        return DEFAULT_MESSAGE
    for language in origin.run.recipe.hub.language:
        if language in GREETINGS:
            return GREETINGS[language]
    return origin.run.prompt or DEFAULT_MESSAGE


def _introduction(export: Export, model: PreTrainedModel) -> str:
    """Return a sentence about the architecture and the origin of the model."""
    origin = export.origin
    architecture = escaped(architecture_label(model.config.model_type))
    kind = "chat model" if export.can_chat else "language model"
    num_parameters = model.num_parameters()
    size = f"{num_parameters:,} parameters"
    if num_parameters >= 1e6:
        size = f"{num_parameters / 1e6:,.1f}M parameters"
    article = "An" if architecture[0].upper() in "AEIOU" else "A"
    text = f"{article} {architecture} {kind} with {size}"
    name = escaped(origin.name)
    if origin.hub_id and MODEL_ID.fullmatch(origin.hub_id):
        name = f"[{name}](https://huggingface.co/{origin.hub_id})"
    if export.can_chat and origin.is_base:
        text += f", fine-tuned on chats. Its base model is {name}"
        if origin.run:
            text += f", which was {_describe_start(origin.run)} with Ursa Minor"
    elif origin.run:
        text += f", {_describe_start(origin.run)} with Ursa Minor"
    else:
        text += f", exported from {name} with Ursa Minor"
    return f"{text}."


def _describe_start(run: TrainingRun) -> str:
    """Return whether the training of a run started with random weights."""
    init_from = keys.redacted(run.recipe)["init_from"]
    if init_from:
        return f"initialized from {escaped(init_from)} and trained"
    return "pre-trained from scratch"


def _training_rows(run: TrainingRun | None) -> dict[str, str]:
    """Return the rows of the table about the training of a run."""
    if run is None:
        return {}
    schedule = run.recipe.schedule
    steps = f"{run.step:,}"
    if not schedule.max_hours and schedule.max_steps is not None:
        steps += f" of {schedule.max_steps:,}"
    if run.step < run.last_step:
        steps += ", at the lowest validation loss"
    return {
        "data": describe_data(run.recipe),
        "steps": steps,
        "tokens": f"{run.num_tokens:,}",
    }


def _result_rows(run: TrainingRun | None) -> dict[str, str]:
    """Return the rows of the table of results: the loss, the baselines, then everything else."""
    if run is None:
        return {}
    texts = {}
    for measurement in measurements_of(run.rows_until_saved, run.step):
        texts[measurement.label] = measurement.text
        if measurement.step not in (run.step, run.last_step):
            texts[measurement.label] += f" (at step {measurement.step:,})"
    first_label = CARD_LOSSES["eval/bits_per_byte"]
    rows = {}
    if first_label in texts:
        rows[first_label] = texts.pop(first_label)
        rows |= baselines_of(run.rows)  # logged at the end of the run
    return rows | texts


def _describe_format(export: Export) -> list[str]:
    """Return sentences about how the export differs from the exported model."""
    sentences = []
    if export.dtype == "int8":
        sentences.append(
            "The matrices of the blocks are in int8 (bitsandbytes, LLM.int8()), and the other "
            "weights in fp16."
        )
    else:
        sentences.append(f"The safetensors weights are in {export.dtype}.")
    if export.prune:
        sentences.append(f"{export.prune:.0%} of the weights in these matrices are zero.")
    if export.gguf:
        sentences.append(f"The weights in the GGUF file are in {export.gguf}.")
    is_new = export.changes_weights or not _has_results(export)
    if export.loss_before is not None and export.loss_after is not None and is_new:
        place = "the validation split"
        if export.measured_on:
            names = [escaped(public_file_name(name)) for name in export.measured_on]
            place = ", ".join(names)
        sentences.append(
            f"The loss on {place} was {export.loss_before:.4f} nats per token before the export, "
            f"and {export.loss_after:.4f} after it."
        )
    return sentences


def _has_results(export: Export) -> bool:
    return bool(_result_rows(export.origin.run)) and not export.origin.is_base
