"""What post_train.py does of its own, where TRL is not installed: settings, prompts, a reward, a model's score.

post_child.main(["MODEL", "prompts.jsonl", "reward.py:cat"])
post_child.main(["--config", "post.yaml"])
"""

import importlib.util
import logging

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.hub import client
from pretrain.model import pretrained
from pretrain.post import problems, rewards

log = logging.getLogger("pretrain.post_child")
LONGEST = 3  # tokens of a completion
ACCEPTED = "these settings are accepted"
TRL = importlib.util.find_spec("trl") is not None


@exit_on_bad_input
def main(argv: list[str]) -> int:
    """Read a file of settings, or score a model: its name, a file of prompts, a reward."""
    console.start(is_main=True)
    if hasattr(console, "clean_prints"):
        console.clean_prints()
    if argv[0].startswith("--"):
        return read_settings(argv)
    model_name, prompts, reward_name = argv
    client.bound_client()
    reward = rewards.CheckedReward(reward_name, rewards.find(reward_name), None)
    rows = problems.read("prompts", prompts)
    name = pretrained.find(model_name, "model =")
    tokenizer, model = tokenization.load(name, of_model=True), pretrained.load(name).float()
    problems.check(model, tokenizer, rows, LONGEST)
    value = problems.score(model, tokenizer, rows, reward, LONGEST)
    log.info(f"{len(rows)} prompts: {value:.3f}; {reward.faults} of {reward.calls} calls failed")
    return 0


def read_settings(argv: list[str]) -> int:
    """Read settings as post_train.py does; without TRL, those of Transformers' trainer, which TRL's extend."""
    if not importlib.util.find_spec("pretrain.post.settings"):  # an older tree
        import post_train

        return post_train.main(argv)
    from pretrain.post import settings

    if TRL:
        from trl import GRPOConfig as Config
    else:
        from transformers import TrainingArguments as Config
    settings.read(argv, Config)
    raise BadInput(ACCEPTED)
