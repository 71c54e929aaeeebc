"""Load the GGUF files with llama.cpp's server, in full precision."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import xllamacpp
from exchange import answer_all

CONTEXT = 128


class Server:
    """A server of llama.cpp in this process."""

    def __init__(self, path: Path):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = CONTEXT
        params.n_parallel = 1
        params.warmup = False
        # The default of the cache is half precision.
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def __call__(self, route: str, **parameters) -> dict:
        """Send a request, and return the JSON object of the answer."""
        request = urllib.request.Request(
            f"{self._server.listening_address}/{route}",
            json.dumps(parameters).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())


def answer(request: dict) -> dict:
    """Return log-probabilities, greedy text, token ids, decoded texts and the text of a chat."""
    folder = Path(request["path"])
    server = Server(folder / f"{folder.name}.gguf")
    ids = [
        server("tokenize", content=text, add_special=True)["tokens"] for text in request["texts"]
    ]
    rows = [log_probs(server, prompt, folder) for prompt in request["prompts"]]
    answer = {
        "ids": ids,
        "decoded": [server("detokenize", tokens=row)["content"] for row in ids],
        "log_probs": np.array([row for row in rows if row is not None]),
        "log_probs_prompts": [index for index, row in enumerate(rows) if row is not None],
        "greedy": [greedy(server, prompt, request["new_tokens"]) for prompt in request["prompts"]],
    }
    if request["chat"]:
        chat = server("apply-template", messages=request["chat"])["prompt"]
        answer["chat"] = [chat]
        answer["chat_ids"] = [server("tokenize", content=chat, parse_special=True)["tokens"]]
    return answer


def log_probs(server: Server, prompt: list[int], folder: Path) -> np.ndarray | None:
    """Return the log-probability of each token after a prompt.

    The server reports none, and this function returns None, if the likeliest token is a part of a
    character.
    """
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    answer = server("completion", prompt=prompt, n_predict=1, temperature=0, n_probs=vocab_size)
    if "completion_probabilities" not in answer:
        return None
    row = np.full(vocab_size, np.nan)
    for token in answer["completion_probabilities"][0]["top_logprobs"]:
        row[token["id"]] = token["logprob"]
    return row


def greedy(server: Server, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    answer = server(
        "completion", prompt=prompt, n_predict=num_tokens, temperature=0, return_tokens=True
    )
    return answer["tokens"]


if __name__ == "__main__":
    answer_all(answer)
