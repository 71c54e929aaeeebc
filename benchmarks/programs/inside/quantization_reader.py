"""Count the matrices of the blocks that torchao and bitsandbytes quantize."""

import json
import sys
from pathlib import Path

import torch
from exchange import answer_all
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig


def is_torchao() -> bool:
    """Return whether the request names torchao, not bitsandbytes."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return request["program"] == "torchao"


def configurations() -> dict:
    """Return the configurations of the program of the request, by the name of the format."""
    if is_torchao():
        from torchao.quantization import Int8WeightOnlyConfig

        return {"int8": TorchAoConfig(Int8WeightOnlyConfig())}
    return {
        "int8": BitsAndBytesConfig(load_in_8bit=True),
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    }


@torch.inference_mode()
def answer(request: dict) -> dict:
    """Return the number of matrices that are not quantized, for each format."""
    prompts = torch.tensor(request["prompts"])
    original = AutoModelForCausalLM.from_pretrained(request["path"]).eval()
    names = set(matrices(original))
    missing = {}
    for label, configuration in configurations().items():
        model = AutoModelForCausalLM.from_pretrained(
            request["path"], quantization_config=configuration, dtype=torch.float32
        ).eval()
        weights = matrices(model)
        quantized = [name for name, weight in weights.items() if is_quantized(weight)]
        if not model(prompts).logits.isfinite().all():
            raise ValueError(f"{label}: the logits are not finite")
        missing[f"matrices that are not quantized, {label}"] = len(names) - len(quantized)
    if original.config.model_type == "gpt2" and is_torchao():
        # A known problem of torchao: no matrix of a GPT-2 is quantized.
        return {"symptoms": {"conv1d": set(missing.values()) == {len(names)}}}
    return {"measured": missing}


def matrices(model) -> dict[str, torch.Tensor]:
    """Return the weights of the blocks' matrices by name."""
    result = {}
    for name, weight in model.named_parameters():
        in_block = ".h." in name or ".layers." in name
        if in_block and weight.dim() == 2:
            result[name] = weight
    return result


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a weight is stored in 8 or 4 bits."""
    is_torchao_tensor = type(weight.data).__module__.startswith("torchao")
    return is_torchao_tensor or not weight.is_floating_point()


if __name__ == "__main__":
    answer_all(answer)
