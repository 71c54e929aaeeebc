"""Load the models that optimum-onnx converted with ONNX Runtime."""

import torch
from exchange import answer_all
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer
from transformers_reader import tokens


@torch.inference_mode()
def answer(request: dict) -> dict:
    """Return logits, greedy text, token ids, decoded texts and the text of a chat."""
    folder = f"{request['path']}-onnx"
    model = ORTModelForCausalLM.from_pretrained(folder)
    prompts = torch.tensor(request["prompts"])
    answer = tokens(AutoTokenizer.from_pretrained(folder), request)
    # Without attention_mask and position_ids, optimum computes them itself.
    answer["logits"] = model(prompts, attention_mask=torch.ones_like(prompts)).logits.numpy()
    rows = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=request["new_tokens"],
        do_sample=False,
    )
    answer["greedy"] = rows[:, prompts.shape[1] :].tolist()
    return answer


if __name__ == "__main__":
    answer_all(answer)
