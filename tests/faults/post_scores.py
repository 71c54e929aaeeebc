"""What post_train.py does of its own, without TRL: reads prompts and a reward, and scores a model by them.

post_scores.main(["MODEL", "prompts.jsonl", "reward.py:cat"])
"""

import logging

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.data import tokenization
from pretrain.hub import client
from pretrain.model import pretrained
from pretrain.post import problems, rewards

log = logging.getLogger("pretrain.post_scores")
LONGEST = 3  # tokens of a completion


@exit_on_bad_input
def main(argv: list[str]) -> int:
    """Score a model: its name, a file of prompts, a reward."""
    model_name, prompts, reward_name = argv
    console.start(is_main=True)
    client.bound_client()
    reward = rewards.CheckedReward(reward_name, rewards.find(reward_name), None)
    rows = problems.read("prompts", prompts)
    name = pretrained.find(model_name, "model =")
    tokenizer, model = tokenization.load(name, of_model=True), pretrained.load(name).float()
    problems.check(model, tokenizer, rows, LONGEST)
    value = problems.score(model, tokenizer, rows, reward, LONGEST)
    log.info(f"{len(rows)} prompts: {value}; {reward.faults} of {reward.calls} calls failed")
    return 0
