"""Turn a recipe's text into a folder of token shards, once: documents -> tokenizer -> ids -> shards, manifest last.

    python prepare_data.py --recipe recipes/own_text.yaml --data_files my.txt

It takes the same recipe and flags as train.py, which starts it when the shards are not there yet.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from pretrain import config, files, shards, stream, tokenization
from pretrain.errors import BadInput, exit_on_bad_input

BATCH_CHARACTERS = 4_000_000  # text that is tokenised at a time


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Prepare the recipe's data and print where it lies."""
    recipe, _ = config.parse_command(
        sys.argv[1:] if argv is None else argv, "Turn text into a folder of token shards.", {}
    )
    if recipe.data_dir:
        raise BadInput(f"data_dir = {recipe.data_dir} is a folder of shards already: there is nothing to prepare")
    source = stream.find_source(**config.source(recipe))
    folder = Path("data") / source.folder_name
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / ".lock", f"{folder} is being prepared by process {{pid}}; wait for it"):
        if shards.read_manifest(folder) is None:
            prepare(source, folder, recipe)
    print(folder)
    return 0


def prepare(source: stream.Source, folder: Path, recipe: config.Recipe) -> None:
    """Write tokenizer, shards and, last, the manifest of ``source`` into ``folder``."""
    started = time.perf_counter()
    documents = list(source.documents())
    print(f"read {len(documents):,} documents of {source.name}", file=sys.stderr, flush=True)
    tokenizer = make_tokenizer(recipe, documents)
    tokenization.save(tokenizer, folder / "tokenizer")
    table = tokenization.token_bytes(tokenizer)
    splits = {}
    for split, group in groupby(documents, key=lambda document: document[0]):
        writer = shards.ShardWriter(folder, split, len(tokenizer))
        for batch in batched((text for _, text in group), BATCH_CHARACTERS):
            for ids, text in zip(tokenization.encode(tokenizer, batch), batch, strict=True):
                text_bytes = len(text.encode("utf-8"))
                if table[ids].sum() != text_bytes:
                    raise BadInput(
                        f"tokenizer = {recipe.tokenizer}: its ids stand for {table[ids].sum()} bytes where the text "
                        f"has {text_bytes}: it changes the text, so bits per byte would be wrong. Use a byte-level one"
                    )
                writer.add(ids, text_bytes)
        splits[split] = writer.close()
    files.write_json(
        folder / shards.MANIFEST,
        {
            "source": source.name,
            "identity": source.identity,
            "tokenizer": {"fingerprint": tokenization.fingerprint(tokenizer), "size": len(tokenizer)},
            "splits": splits,
            "complete": True,
        },
    )
    for split, rows in splits.items():
        tokens, text_bytes = sum(row["tokens"] for row in rows), sum(row["text_bytes"] for row in rows)
        print(
            f"{split}: {tokens:,} tokens, {text_bytes / 1e6:.2f} MB, {text_bytes / tokens:.2f} bytes per token",
            file=sys.stderr,
        )
    print(f"prepared in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def make_tokenizer(recipe: config.Recipe, documents: list[tuple[str, str]]):
    """Return the recipe's tokenizer: trained on the train split, one id a character, or loaded."""
    if recipe.tokenizer == "bpe":
        train = (text for split, text in documents if split == "train")
        return tokenization.train_bpe(train, recipe.tokenizer_vocab_size)
    if recipe.tokenizer == "characters":
        return tokenization.make_characters(text for _, text in documents)
    return tokenization.load(recipe.tokenizer)


def batched(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Group texts so that each group holds about this many characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    sys.exit(main())
