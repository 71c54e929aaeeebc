"""Post-train a base model with TRL.

The settings of ``post_train.py`` and files of prompts come in. The prompts, the reward and the
model are prepared here for TRL's GRPOTrainer, which does the training.

- ``settings``: the YAML file and the flags of ``post_train.py``
- ``chat``: the chat template and its tokens, and conversations with a model
- ``prompts``: prompts from files, and the score of a model on held-out prompts
- ``rewards``: reward functions and reward models
- ``positions``: position ids under left padding
- ``report``: log lines, metrics.jsonl and reward.png
"""
