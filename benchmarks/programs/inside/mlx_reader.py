"""Load the models with mlx-lm."""

import mlx.core as mx
import mlx_lm
import numpy as np
from exchange import answer_all
from mlx_lm.generate import generate_step


def answer(request: dict) -> dict:
    """Return logits, greedy text, token ids, decoded texts and the text of a chat."""
    model, tokenizer = mlx_lm.load(request["path"])
    ids = [tokenizer.encode(text) for text in request["texts"]]
    answer = {
        "logits": np.array(model(mx.array(request["prompts"])).astype(mx.float32)),
        "greedy": [greedy(model, prompt, request["new_tokens"]) for prompt in request["prompts"]],
        "ids": ids,
        "decoded": [tokenizer.decode(row) for row in ids],
    }
    if request["chat"]:
        chat = tokenizer.apply_chat_template(
            request["chat"], tokenize=False, add_generation_prompt=True
        )
        answer["chat"] = [chat]
        answer["chat_ids"] = [tokenizer.encode(chat, add_special_tokens=False)]
    return answer


def greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt. Without a sampler, generate_step is greedy."""
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


if __name__ == "__main__":
    answer_all(answer)
