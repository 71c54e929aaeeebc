"""The section "Which file do you have?" of docs/data.md: its commands convert and prepare files."""

import gzip
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run_script

NUM_DOCUMENTS = 40
WORDS = ("river", "stone", "lamp", "orchard", "winter", "tailor", "copper", "wagon", "marble")
# The documents of the train and validation split of each command, in the order of the page.
DOCUMENTS = (
    ("TinyStories", (40, 4)),
    ("WikiExtractor with --json", 38),  # two articles have no text
    ("WikiExtractor", 40),
    ("WhatsApp", (1, 1)),
    ("Telegram", (1, 1)),
    ("subtitles", (2, 1)),  # the validation split is the end of the last file
    ("OSCAR", 40),
    ("The Stack", 38),  # two rows have no text
    ("messages", 40),
    ("ShareGPT", 40),
    ("sentences", 40),
    ("Leipzig Corpora", 40),
    ("code", (3, 1)),
    ("saved folder", 40),
    ("saved splits", (40, 4)),
    ("BabyLM", (2, 2)),
    ("token ids", 40),
)


def sentence(number: int) -> str:
    word = WORDS[number % len(WORDS)]
    return f"The {word} near the orchard is number {number}."


SENTENCES = [sentence(number) for number in range(NUM_DOCUMENTS)]


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")


def read_lines(name: str) -> list[str]:
    return Path(name).read_text(encoding="utf-8").splitlines()


def json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- small files with the form of well-known ones


def write_stories_and_articles() -> None:
    stories = [f"\n{text}\n\n{text}\n<|endoftext|>\n" for text in SENTENCES]
    write("TinyStoriesV2-GPT4-train.txt", "".join(stories))
    write("TinyStoriesV2-GPT4-valid.txt", "".join(stories[:4]))
    for folder, start in (("AA", 0), ("AB", 20)):
        articles = ""
        rows = []
        for number in range(start, start + 20):
            text = "" if number == start else SENTENCES[number]
            url = f"https://xx.wikipedia.org/wiki?curid={number}"
            rows.append({"id": str(number), "url": url, "title": "Title", "text": text})
            articles += (
                f'<doc id="{number}" url="{url}" title="Title">\nTitle\n\n{text}\n\n</doc>\n'
            )
        write(f"json/{folder}/wiki_00", json_lines(rows))
        write(f"extracted/{folder}/wiki_00", articles)


def write_chats() -> None:
    """Write a WhatsApp export with lines of both phones, and an export of a Telegram account."""
    lines = ["[05/03/2025, 10:14:30] Mara: \u200eMessages are encrypted."]
    lines.append("\u200e[05/03/2025, 10:14:33] Mara: \u200eimage omitted")
    for number, text in enumerate(SENTENCES):
        header = "12.07.22, 23:14 - " if number % 2 else "7/12/22, 11:14\u202fPM - "
        lines.append(f"{header}Joel K.: {text}\nsecond line")
    write("_chat.txt", "\r\n".join(lines))
    messages = [{"type": "service", "text": ""}]
    for text in SENTENCES:
        link = {"type": "link", "text": "https://example.org"}
        messages.append({"type": "message", "from": "Mara", "text": [text, " ", link]})
        messages.append({"type": "message", "from": "Joel", "text": text})
    chats = {"list": [{"name": "Family", "messages": messages}]}
    write("result.json", json.dumps({"about": "Here is the data", "chats": chats}, indent=1))
    for name in ("a", "b"):
        titles = []
        for number, text in enumerate(SENTENCES):
            times = "00:00:01,000 --> 00:00:04,500"
            titles.append(f"{number + 1}\r\n{times}\r\n<i>{text}</i>\r\n\r\n")
        write(f"subtitles/{name}.srt", "\ufeff" + "".join(titles))


def write_tables() -> None:
    rows = [{"content": text, "warc_headers": {}, "metadata": None} for text in SENTENCES]
    Path("oscar").mkdir()
    compressed = gzip.compress(json_lines(rows).encode())
    Path("oscar/hi_part_1.jsonl.gz").write_bytes(compressed)
    Path("stack").mkdir()
    table = pa.table({"content": [None, "", *SENTENCES[2:]]})
    pq.write_table(table, "stack/a.parquet")
    conversations = []
    shared = []
    for text in SENTENCES:
        user = {"role": "user", "content": text}
        assistant = {"role": "assistant", "content": text}
        conversations.append({"messages": [user, assistant]})
        message = {"from": "human", "value": text}
        shared.append({"id": "a", "conversations": [message]})
    write("messages.jsonl", json_lines(conversations))
    write("sharegpt.json", json.dumps(shared))
    from datasets import Dataset, DatasetDict

    saved = Dataset.from_dict({"text": SENTENCES})
    saved.save_to_disk("saved")
    splits = {"train": saved, "test": Dataset.from_dict({"text": ["Other text."] * 4})}
    DatasetDict(splits).save_to_disk("saved_dict")


def write_texts() -> None:
    write("sentences.txt", "".join(f"{text}\n" for text in SENTENCES))
    numbered = "".join(f"{number}\t{text}\n" for number, text in enumerate(SENTENCES))
    write("hin_news_2020_10K-sentences.txt", numbered)
    write("project/__init__.py", "")
    write("project/a.py", "x = 1\n" * 50)
    write("project/b/c.py", "y = 1\n" * 50)
    write("project/README.md", "\n".join(SENTENCES))
    for name in ("childes", "simple_wiki"):
        write(f"train_10M/{name}.train", "\n".join(SENTENCES))
        write(f"dev/{name}.dev", "other text\n" * 20)


def write_token_ids() -> None:
    """Write the tokenizer of a prepared folder, and rows of its ids."""
    from tokenizers import Tokenizer

    write("other/text.txt", "\n".join(SENTENCES))
    run_script("prepare_data.py", "--recipe", "recipes/own_text.yaml", "--data_files", "other/*")
    (folder,) = Path("data").glob("text-*/tokenizer")
    shutil.copytree(folder, "my_tokenizer")
    tokenizer = Tokenizer.from_file("my_tokenizer/tokenizer.json")
    rows = []
    for text in SENTENCES:
        encoding = tokenizer.encode(text)
        rows.append({"input_ids": encoding.ids})
    write("ids.jsonl", json_lines(rows))


# ---- the commands of the section


class Step(NamedTuple):
    """Commands of the section: shell commands, or one that starts prepare_data.py."""

    text: str
    is_preparation: bool


def read_steps() -> list[Step]:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Which file do you have\?\n(.*?)\n## ", page, re.DOTALL)
    steps = []
    for block in re.findall(r"(?:^    .*\n)+", section, re.MULTILINE):
        shell, *preparations = re.split(r"^    python prepare_data\.py ", block, flags=re.MULTILINE)
        if shell:
            steps.append(Step(shell, is_preparation=False))
        for preparation in preparations:
            steps.append(Step(preparation.replace("\\\n", " "), is_preparation=True))
    return steps


def num_documents(text: str) -> tuple[int, int]:
    """Prepare data, and return the number of documents in the train and validation split."""
    words = shlex.split(text)
    if "--validation_tokens" in words:
        words += ["--validation_tokens", "100"]
    output = run_script("prepare_data.py", *words).stderr
    counts = dict(re.findall(r"(train|validation): .* documents (\d+)", output))
    return int(counts["train"]), int(counts["validation"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_public_files_become_documents_of_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    write_stories_and_articles()
    write_chats()
    write_tables()
    write_texts()
    write_token_ids()

    results = []
    for step in read_steps():
        if step.is_preparation:
            results.append(num_documents(step.text))
        else:
            subprocess.run(["bash", "-e", "-c", step.text], check=True)

    assert len(results) == len(DOCUMENTS)
    for (name, expected), documents in zip(DOCUMENTS, results, strict=True):
        if isinstance(expected, int):  # validation_tokens divides them
            assert sum(documents) == expected, name
        else:
            assert documents == expected, name
    chat = read_lines("whatsapp.txt")
    assert chat[0].endswith("Messages are encrypted.")
    assert chat[1::2] == SENTENCES
    assert set(chat[2::2]) == {"second line"}
    assert read_lines("telegram.txt")[:2] == [f"{SENTENCES[0]} https://example.org", SENTENCES[0]]
    assert read_lines("subtitles_text/a.txt") == SENTENCES
