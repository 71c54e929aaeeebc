"""Adapt the models with LoRA, merge the adapter, and load the merged model."""

import tempfile
from pathlib import Path

import torch
from exchange import answer_all
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

WRONG = 0.1  # a difference of logits that no rounding explains


@torch.inference_mode()
def answer(request: dict) -> dict:
    """Return logits with an adapter of zeros, and differences between adapted and merged models."""
    prompts = torch.tensor(request["prompts"])
    adapted = adapt(request["path"], None)
    logits = adapted(prompts).logits.float().numpy()

    randomize(adapted)
    expected = adapted(prompts).logits
    merged = adapted.merge_and_unload()
    answer = {
        "logits": logits,
        "measured": {
            "merged LoRA": difference(merged(prompts).logits, expected),
            "merged LoRA, saved and loaded": reloaded_difference(merged, prompts, expected),
        },
    }
    if merged.config.model_type == "gpt2":
        answer["symptoms"] = {"embedding": embedding_is_wrong(request["path"], prompts)}
    return answer


def adapt(path: str, target_modules: list[str] | None) -> PeftModel:
    """Return a model with an adapter that does not change it yet."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return get_peft_model(model, LoraConfig(r=4, target_modules=target_modules)).eval()


def randomize(model: PeftModel) -> None:
    """Give the adapter random weights."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2)


def reloaded_difference(merged, prompts: torch.Tensor, expected: torch.Tensor) -> float:
    """Save a merged model, and return the difference of the loaded one."""
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(Path(folder))
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        return difference(loaded(prompts).logits, expected)


def embedding_is_wrong(path: str, prompts: torch.Tensor) -> bool:
    """Return whether merging an adapter of the tied embedding changes the logits."""
    adapted = adapt(path, ["wte"])
    randomize(adapted)
    expected = adapted(prompts).logits
    merged = adapted.merge_and_unload()
    return difference(merged(prompts).logits, expected) > WRONG


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    answer_all(answer)
