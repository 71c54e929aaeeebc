"""What an estimate says that a card waits for its data is what a run waits, behind a Hub that is slow."""

import os
import random
import re
import shlex
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import RECIPE, ROOT
from data_server import DataServer

from pretrain.machine.supply import Supply
from tests.runs import rows

FILES, ROWS, BYTES_PER_SECOND = 32, 40, 80_000
FLAGS = shlex.split(
    "--recipe slow.yaml --tokens_per_step 2048 --per_device_train_batch_size 128 --logging_steps 10 --eval_steps 0 "
    "--sample_steps 0 --save_steps 0 --run_name slow"
)


@pytest.mark.slow
def test_the_wait_that_is_predicted_is_the_wait_behind_a_slow_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus, draw = tmp_path / "datasets" / "me" / "corpus", random.Random(1)
    corpus.mkdir(parents=True)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]
    for number in range(FILES):
        texts = [" ".join(draw.choices(words, k=400)) for _ in range(ROWS)]
        pq.write_table(pa.table({"text": texts}), corpus / f"part-{number:02d}.parquet", compression="none")
    recipe = RECIPE.replace("validation_fraction: 0.1\n", "dataset_name: me/corpus\nvalidation_tokens: 10000\n")
    recipe = recipe.replace("vocab_size: 64", "vocab_size: 2048\ntokenizer_vocab_size: 2000").replace(
        "characters", "bpe"
    )
    (tmp_path / "slow.yaml").write_text(recipe + "shuffle_block_tokens: 10000\nshard_tokens: 10000\n")

    with DataServer(tmp_path) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_DISABLE_XET": "1", "ACCELERATE_USE_CPU": "true", "WANDB_MODE": "disabled"}

        def called(script: str, *flags: str) -> str:
            command = [sys.executable, str(ROOT / script), *FLAGS, *flags]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr

        called("prepare_data.py", "--prepared_data_dir", "once")  # the tokenizer is of all text: not at the slow pace
        (tokenizer,) = (tmp_path / "once").glob("*/tokenizer")
        server.rate = BYTES_PER_SECOND
        slow = ("--tokenizer", str(tokenizer))
        said = called("prepare_data.py", *slow, "--dry_run")
        speed = float(re.search(r"([\d,]+) tokens/s \(measured", said)[1].replace(",", ""))
        tokens = int(re.search(r"([\d,]+) tokens \(estimated", said)[1].replace(",", ""))
        steps = int(0.9 * tokens) // 2048
        called("train.py", *slow, "--max_steps", str(steps))
    last = [row for row in rows("slow") if "data_wait_seconds" in row][-1]
    training = last["elapsed_seconds"] - last["data_wait_seconds"]
    predicted = Supply(tokens, speed).waiting_seconds(2048 * steps, training)
    print(f"\n{speed:,.0f} tokens/s, {2048 * steps:,} tokens, training {training:.1f} s: predicted {predicted:.1f} s, "
          f"waited {last['data_wait_seconds']:.1f} s")  # fmt: skip
    assert predicted > 10 and predicted == pytest.approx(last["data_wait_seconds"], rel=0.2)
