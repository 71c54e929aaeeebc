"""A GGUF file: llama.cpp has the same ids, the same log-probabilities and the same greedy text as Transformers."""

import json
import random
import re
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import KINDS, build_small_model
from tokenizers import Tokenizer, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import gguf as gguf_export
from ursa_minor.export import stock as stock_export
from ursa_minor.post import chat

gguf = pytest.importorskip("gguf")
SCRIPTS = {
    "Devanagari": "यह एक छोटा वाक्य है और हिन्दी में लिखा गया क्षेत्र ज्ञान श्री १२३ पढ़ना",
    "Khmer": "នេះ ជា ប្រយោគ ខ្លី មួយ ដែល សរសេរ ជា ភាសាខ្មែរ ស្រុក ១២៣ ការប្រើប្រាស់",
    "Cyrillic": "это короткое предложение на русском языке Ёлка объём № 42 что-нибудь",
    "Han": "这是 一个 用中文 写的 短句。 数据库 文件，打开 「引号」 第二段 12345 漢字",
    "Japanese": "これは 日本語で 書かれた 短い 文です。 データベース ファイル を開く ー〜 ２０２６年",
    "Arabic": "هذه جملة قصيرة مكتوبة باللغة العربية مَكْتَبَة ١٢٣ لا، نعم؟ كتابٌ",
    "Thai": "นี่คือ ประโยคสั้น ที่เขียนเป็น ภาษาไทย ผู้ใช้ ๑๒๓ น้ำ เก็บไว้",
    "Tamil": "இது தமிழில் எழுதப்பட்ட ஒரு சிறிய வாக்கியம் கோப்பு ௧௨ ஸ்ரீ",
    "Latin": "Das ist ein kurzer Satz, daß wir's schrieben: don't DON'T e\u0301 ﬁ 3.14 x_y",
}
JOINS = [
    " ",
    " ",
    " ",
    "",
    "\n",
    "\r\n",
    ".\n",
    "  ",
    "\t",
    "\u200d",
    "\u200c",
    "!? ",
    "\n\n  ",
    "\u00a0",
    "1",
]
JOINS.append("\ufeff")
TEXTS = [text for text in SCRIPTS.values() for _ in range(30)]
SHAPES = {"gpt2": {}, "llama": KINDS["untied"] | {"intermediate_size": 96}}


def strings(script: str, number: int = 200) -> list[str]:
    draw, words = random.Random(script), SCRIPTS[script].split()
    return [
        "".join(draw.choice(words) + draw.choice(JOINS) for _ in range(draw.randint(1, 12)))
        for _ in range(number)
    ]


def made(folder, kind="gpt2", split="qwen35", precision="f32", talks=False):
    """A model with weights far from uniform, written; the model as stock, its tokenizer."""
    tokenizer = tokenization.train_bpe(TEXTS, 700, split)
    torch.manual_seed(2)
    shape = {"n_embd": 64, "n_head": 4, "vocab_size": 704, "sequence_length": 64} | SHAPES[kind]
    model = build_small_model(**shape).eval()
    for weight in model.parameters():
        weight.data.mul_(4.0 if weight.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(weight))
    if talks:
        chat.add_chat(model, tokenizer)
    gguf_export.check_supported(model, tokenizer)
    stock = stock_export.to_transformers(model, tokenizer, trim_vocab=True)
    stock_export.save(stock, folder, tokenizer)
    gguf_export.write(stock, tokenizer, folder, "mine", precision)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "precision"), [("llama", "f32"), ("gpt2", "f16"), ("llama", "q8_0")]
)
def test_a_file_holds_every_weight_once_in_the_precision_asked_for_and_the_tokenizer(
    tmp_path, kind, precision
):
    stock, tokenizer = made(tmp_path, kind, precision=precision)
    found = gguf.GGUFReader(tmp_path / "mine.gguf")
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in found.tensors
    }
    total = sum(parameter.numel() for parameter in stock.parameters())
    assert sum(value.size for value in values.values()) == total
    matrices = [
        tensor
        for tensor in found.tensors
        if tensor.name.startswith("blk") and "_norm" not in tensor.name
    ]
    kinds = {tensor.tensor_type.name for tensor in matrices}
    assert kinds - {"F32"} == {precision.upper()} - {"F32"}
    wte = stock.get_input_embeddings().weight.detach().numpy()
    assert (
        np.abs(values["token_embd.weight"] - wte).max()
        <= {"f32": 0, "f16": 1e-3, "q8_0": 1e-2}[precision]
    )
    fields = {name: field.contents() for name, field in found.fields.items()}
    assert fields["tokenizer.ggml.pre"] == "qwen35" and fields["general.architecture"] == kind
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(
        list(range(len(tokenizer)))
    )
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id and len(wte) == len(
        tokenizer
    )
    wanted = 'FROM ./mine.gguf\nTEMPLATE "{{ .Prompt }}"\nPARAMETER num_ctx 64'
    assert (tmp_path / "Modelfile").read_text().startswith(wanted)


@pytest.mark.parametrize(
    ("precision", "width", "weight", "value", "limit"),
    [
        ("f16", 64, "transformer.h.0.mlp.c_fc.weight", 1e5, "f16 (--gguf f16) ends at 65504"),
        ("f16", 64, "transformer.wte.weight", 1e5, "f16 (--gguf f16) ends at 65504"),
        (
            "q8_0",
            64,
            "transformer.h.0.mlp.c_fc.weight",
            -1e7,
            "q8_0 (--gguf q8_0) ends at 8.31901e+06",
        ),
        ("q8_0", 48, "transformer.h.0.mlp.c_fc.weight", 1e5, "f16 (--gguf q8_0) ends at 65504"),
        ("q8_0", 64, "transformer.h.0.mlp.c_fc.weight", 1e5, None),  # its blocks have scales
        ("f32", 64, "transformer.h.0.mlp.c_fc.weight", 1e38, None),
        ("f16", 64, "transformer.h.0.mlp.c_fc.bias", 1e5, None),  # vectors are stored in fp32
        ("f16", 64, "transformer.wpe.weight", 1e5, None),
    ],
)
def test_weight_that_would_become_infinite_is_refused(
    tmp_path, precision, width, weight, value, limit
):
    tokenizer = tokenization.train_bpe(TEXTS, 400)
    model = build_small_model(n_embd=width, vocab_size=448)
    with torch.no_grad():
        model.get_parameter(weight).flatten()[1] = value
    stock = stock_export.to_transformers(model, tokenizer, trim_vocab=True)
    if limit is None:
        gguf_export.check_overflow(stock, precision)
        return
    words = f"{weight} has values up to {abs(value):.6g}, but {limit}. Use --gguf f32"
    with pytest.raises(BadInput, match=f"^{re.escape(words)}$"):
        gguf_export.check_overflow(stock, precision)
    with pytest.raises(BadInput, match=re.escape(words)):
        gguf_export.write(stock, tokenizer, tmp_path, "mine", precision)
    assert not list(tmp_path.iterdir())


def with_split(regex, **model):
    tokenizer = tokenization.train_bpe(TEXTS, 400)
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
    definition["model"] |= model
    made = Tokenizer.from_str(json.dumps(definition))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def test_what_llama_cpp_would_split_or_compute_otherwise_is_refused():
    model = build_small_model(vocab_size=704)
    for name, regex, options in (
        ("qwen2", split_points.QWEN2, {}),
        ("llama-bpe", split_points.LLAMA3, {"ignore_merges": True}),
    ):
        gguf_export.check_supported(model, with_split(regex, **options))
        assert gguf_export.SPLITS[regex][0] == name
    lowered = tokenization.train_bpe(TEXTS, 400)
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    others = [
        with_split(split_points.O200K),
        with_split(split_points.LLAMA3),
        with_split(split_points.QWEN35, ignore_merges=True),
        lowered,
    ]
    for tokenizer in (*others, tokenization.make_characters(TEXTS)):
        with pytest.raises(
            BadInput, match="does not support the way in which this tokenizer splits"
        ):
            gguf_export.check_supported(model, tokenizer)
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    for config, words in [
        (
            GPT2Config(activation_function="relu"),
            "activation_function = relu, but llama.cpp supports only gelu_new, ",
        ),
        (
            GPT2Config(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx = True, but .* only False",
        ),
        (LlamaConfig(rope_parameters=scaled), "rope_type = linear, but .* only default"),
        (BloomConfig(), "model_type = bloom, but .* only gpt2 or llama"),
    ]:
        with pytest.raises(BadInput, match=f"--gguf: the model has {words}"):
            gguf_export.check_supported(
                SimpleNamespace(config=config), tokenization.train_bpe(TEXTS, 400)
            )


class LlamaCpp:
    """llama.cpp itself, asked as its server is."""

    def __init__(self, path):
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 64, 1, False
        params.cache_type_k = params.cache_type_v = (
            xllamacpp.ggml_type.GGML_TYPE_F32
        )  # by default half precision
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def __call__(self, route, **asked):
        address = f"{self._server.listening_address}/{route}"
        asked = urllib.request.Request(
            address, json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.parametrize("split", ["gpt2", "qwen35"])
def test_llama_cpp_makes_the_tokenizers_ids_of_every_script(tmp_path, split):
    _, tokenizer = made(tmp_path, split=split)
    run, encode = LlamaCpp(tmp_path / "mine.gguf"), tokenization.Encoder(tokenizer)
    for script in SCRIPTS:
        for text in strings(script):
            found = run("tokenize", content=text, add_special=True)["tokens"]
            assert found == encode([text])[0].tolist(), (script, text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("precision", "within"), [("f32", 2e-3), ("f16", 3e-2), ("q8_0", 0.5)])
def test_llama_cpp_computes_the_models_log_probabilities_and_greedy_text(
    tmp_path, kind, precision, within
):
    stock, tokenizer = made(tmp_path, kind, precision=precision)
    run, encode, worst = LlamaCpp(tmp_path / "mine.gguf"), tokenization.Encoder(tokenizer), []
    behind: list[float] = []
    for text in [text for script in SCRIPTS for text in strings(script, 6)]:
        ids = encode([text[:20]])[0].tolist()[:20]
        found = run("completion", prompt=ids, n_predict=1, temperature=0, n_probs=len(tokenizer))
        if (
            "completion_probabilities" in found
        ):  # not where the likeliest token is a part of a character
            theirs = {
                one["id"]: one["logprob"]
                for one in found["completion_probabilities"][0]["top_logprobs"]
            }
            with torch.inference_mode():
                ours = stock(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert len(theirs) == len(tokenizer)
            worst.append(max(abs(ours[i].item() - value) for i, value in theirs.items()))
        new = run("completion", prompt=ids, n_predict=12, temperature=0, return_tokens=True)[
            "tokens"
        ]
        with torch.inference_mode():
            likely = stock(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        behind.append(
            (likely.max(-1).values - likely[range(len(new)), new]).max().item()
        )  # 0: the same greedy text
    assert len(worst) >= 20 and max(worst) < within and max(behind) < within, (worst, behind)
    assert (
        precision != "f32" or sum(gap == 0 for gap in behind) > 50
    )  # the others are ties, to within rounding
    print(f"{kind}, {precision}: {len(worst)} prompts, worst difference {max(worst):.1e} nats")


@pytest.mark.slow
def test_llama_cpp_renders_a_chat_as_transformers_does(tmp_path):
    _, tokenizer = made(tmp_path, talks=True)
    turns = (("user", "यह एक"), ("assistant", "छोटा"), ("user", "है"))
    said = [{"role": role, "content": words} for role, words in turns]
    run = LlamaCpp(tmp_path / "mine.gguf")
    theirs = run("apply-template", messages=said)["prompt"]
    assert theirs == tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    ids = run("tokenize", content=theirs, parse_special=True)["tokens"]
    assert ids == chat.prompt_ids(tokenizer, said)
    assert "<|im_start|>{{ .Role }}" in (tmp_path / "Modelfile").read_text()
