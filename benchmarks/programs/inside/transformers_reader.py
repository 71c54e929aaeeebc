"""Load the models with Transformers."""

import torch
from exchange import answer_all
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def answer(request: dict) -> dict:
    """Return logits, greedy text, token ids, decoded texts and the text of a chat."""
    tokenizer = AutoTokenizer.from_pretrained(request["path"])
    model = AutoModelForCausalLM.from_pretrained(request["path"]).eval()
    prompts = torch.tensor(request["prompts"])
    answer = tokens(tokenizer, request)
    answer["logits"] = model(prompts).logits.float().numpy()
    new_tokens = request["new_tokens"]
    rows = model.generate(prompts, max_new_tokens=new_tokens, do_sample=False)
    answer["greedy"] = rows[:, prompts.shape[1] :].tolist()
    return answer


def tokens(tokenizer, request: dict) -> dict:
    """Return the ids of the texts, the texts of these ids, and the text and ids of a chat."""
    ids = [tokenizer(text)["input_ids"] for text in request["texts"]]
    answer = {"ids": ids, "decoded": [tokenizer.decode(row) for row in ids]}
    if request["chat"]:
        chat = tokenizer.apply_chat_template(
            request["chat"], tokenize=False, add_generation_prompt=True
        )
        answer["chat"] = [chat]
        answer["chat_ids"] = [tokenizer(chat, add_special_tokens=False)["input_ids"]]
    return answer


if __name__ == "__main__":
    answer_all(answer)
