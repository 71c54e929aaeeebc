"""Load the converted models with CTranslate2. The tokenizer is that of Transformers."""

import subprocess

import ctranslate2
import numpy as np
from exchange import answer_all
from transformers import AutoTokenizer

REJECTED = "Vocabulary has size"


def answer(request: dict) -> dict:
    """Return logits and greedy text, and whether a padded GPT-2 is rejected."""
    generator = ctranslate2.Generator(f"{request['path']}-ct2")
    prompts = request["prompts"]
    tokenizer = AutoTokenizer.from_pretrained(request["path"])
    tokens = [tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
    results = generator.generate_batch(
        tokens, max_length=request["new_tokens"], include_prompt_in_result=False
    )
    answer = {
        "logits": np.array(generator.forward_batch(tokens)),
        "greedy": [result.sequences_ids[0] for result in results],
    }
    if request["path"].endswith("gpt2-trimmed"):
        padded = request["path"].removesuffix("-trimmed")
        answer["symptoms"] = {"padded": is_rejected(padded)}
    return answer


def is_rejected(path: str) -> bool:
    """Return whether the converter rejects a model because of its padding rows."""
    command = ["ct2-transformers-converter", "--model", path, "--output_dir", f"{path}-ct2"]
    process = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
    return process.returncode != 0 and REJECTED in process.stderr


if __name__ == "__main__":
    answer_all(answer)
