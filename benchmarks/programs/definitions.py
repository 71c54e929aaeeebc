"""Definitions of the compared programs: packages, commands, limits, known problems."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent / "inside" / "llama_cpp_example.py"
TRANSFORMERS = "transformers==5.23.0"


@dataclass(frozen=True)
class KnownProblem:
    """A problem of a program. It is reproduced whenever the program is run, if it has a name.

    Attributes:
        name: its key among the symptoms that a script reports, or "".
        text: the symptom, as docs/export.md describes it.
        suggestion: what to do.
    """

    name: str
    text: str
    suggestion: str


@dataclass(frozen=True)
class Program:
    """A program that loads our models.

    Attributes:
        name: for the page.
        version: of the program.
        packages: pinned requirements of its environment, for pip or npm. None means the
            environment of this project.
        script: file in ``inside/`` that loads the models.
        models: the exported folder that the program loads for each kind of model.
        needs_torch: whether the environment contains PyTorch.
        npm: whether the packages are those of npm.
        commands: shell commands that are run before the script, in the folder that contains
            exports/. They are shown on the page. A command that contains {model} is run for each
            exported folder.
        example: a Python file that is run in the same folder and shown on the page.
        limits: the largest accepted difference, by the name of the comparison, where it is not
            ``comparison.STRICT``.
        gpt2_limits: the same for models of type GPT-2 only.
        notes: reasons for these limits. docs/export.md contains them.
        problems: known problems.
    """

    name: str
    version: str
    packages: tuple[str, ...] | None
    script: str
    models: Mapping[str, str]
    needs_torch: bool = True
    npm: bool = False
    commands: tuple[str, ...] = ()
    example: Path | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    gpt2_limits: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""
    problems: tuple[KnownProblem, ...] = ()

    @property
    def environment(self) -> str:
        """Return the name of the environment's folder."""
        return f"{self.name}-{self.version}".replace(" ", "-").lower()


ALL = {"gpt2": "gpt2", "bpe": "bpe", "llama": "llama", "chat": "chat"}


def transformers(version: str, **options) -> Program:
    """Return the definition of a version of Transformers."""
    packages = None if f"transformers=={version}" == TRANSFORMERS else (f"transformers=={version}",)
    return Program("Transformers", version, packages, "transformers_reader.py", ALL, **options)


PIPELINE = (
    "python -c 'from transformers import pipeline; "
    'print(pipeline("text-generation", "exports/gpt2")("The", max_new_tokens=50))\''
)

PROGRAMS = (
    transformers("4.46.3"),
    transformers("4.57.6"),
    transformers("5.17.0"),
    transformers(
        "5.23.0", commands=(PIPELINE,), notes="Compared with the model before its export."
    ),
    Program(
        "llama.cpp",
        "xllamacpp 2026.10.11549",
        ("xllamacpp==2026.10.11549", "numpy"),
        "llama_cpp_reader.py",
        {name: f"{name}-gguf" for name in ALL},
        needs_torch=False,
        example=EXAMPLE,
        gpt2_limits={"log_probs": 1e-2},
        notes="llama.cpp reads GELU from a table in fp16. The limit for a GPT-2 is 0.01 nats.",
    ),
    Program(
        "CTranslate2",
        "4.8.5",
        ("ctranslate2==4.8.5", TRANSFORMERS),
        "ctranslate2_reader.py",
        {"gpt2": "gpt2-trimmed", "bpe": "bpe-trimmed", "llama": "llama", "chat": "chat-trimmed"},
        commands=("ct2-transformers-converter --model {model} --output_dir {model}-ct2 --force",),
        problems=(
            KnownProblem(
                "padded",
                'a padded GPT-2 is rejected ("Vocabulary has size 50257 but the model expected a '
                'vocabulary of size 50304")',
                "export it with `--trim_vocab`",
            ),
        ),
    ),
    Program(
        "mlx-lm",
        "0.32.2",
        ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2", TRANSFORMERS),
        "mlx_reader.py",
        ALL,
        commands=("mlx_lm.generate --model exports/gpt2 --prompt The --max-tokens 20",),
        needs_torch=False,
    ),
    Program(
        "ONNX Runtime",
        "1.32.0",
        ("onnxruntime==1.32.0", "optimum-onnx[onnxruntime]==0.1.0"),
        "onnx_reader.py",
        ALL,
        commands=(
            "optimum-cli export onnx --task text-generation-with-past --model {model} {model}-onnx",
        ),
    ),
    Program(
        "transformers.js",
        "4.3.2",
        ("@huggingface/transformers@4.3.2",),
        "transformers_js_reader.mjs",
        ALL,
        needs_torch=False,
        npm=True,
        limits={"ids": 25},
        notes="The greedy texts are those of the models that optimum-onnx has converted.",
        problems=(
            KnownProblem(
                "",
                "with GPT-2's way to split text, the ids of some texts with U+0085 or U+FEFF "
                "differ, because JavaScript's `\\s` contains other characters",
                "use `tokenizer_split: qwen35`, the default of `bpe`",
            ),
        ),
    ),
    Program(
        "lm-eval",
        "0.4.13",
        ("lm-eval[hf]==0.4.13", TRANSFORMERS),
        "lm_eval_reader.py",
        ALL,
        limits={"endings": 1e-3, "rolling": 1e-3},
        notes="In nats. The limit is 0.001, because lm-eval adds the terms of a text in fp32.",
        problems=(
            KnownProblem(
                "",
                "the rolling log-likelihood of a text that is longer than the context is higher "
                "than ours, because the last window begins earlier",
                "compare texts that fit into the context",
            ),
        ),
    ),
    Program(
        "PEFT",
        "0.21.2",
        ("peft==0.21.2", "trl==1.16.0", TRANSFORMERS),
        "peft_reader.py",
        ALL,
        commands=(
            "trl sft --model_name_or_path exports/chat --dataset_name chats --output_dir tuned "
            "--use_peft --max_steps 2 --max_length 128 --learning_rate 1e-3 --bf16 false "
            "--gradient_checkpointing false --report_to none",
            "trl sft --model_name_or_path exports/chat --dataset_name chats --output_dir tuned-2 "
            "--max_steps 2 --max_length 128 --learning_rate 1e-3 --bf16 false "
            "--gradient_checkpointing false --report_to none",
        ),
        problems=(
            KnownProblem(
                "embedding",
                'LoRA on the tied embedding (`target_modules=["wte"]`) merges to a model with '
                "other logits, without a message",
                "do not adapt `wte` and `lm_head`; merge the adapter before you export",
            ),
        ),
    ),
    Program(
        "torchao",
        "0.18.0",
        ("torchao==0.18.0", "accelerate==1.15.0", TRANSFORMERS),
        "quantization_reader.py",
        ALL,
        problems=(
            KnownProblem(
                "conv1d",
                "no matrix of a GPT-2's blocks is quantized, without a message",
                "use bitsandbytes (`export_model.py --dtype int8`); use torchao for the Llama "
                "type only",
            ),
        ),
    ),
    Program(
        "bitsandbytes",
        "0.50.2",
        ("bitsandbytes==0.50.2", "accelerate==1.15.0", TRANSFORMERS),
        "quantization_reader.py",
        ALL,
    ),
)
