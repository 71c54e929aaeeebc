"""Post-training of a base model with TRL.

- ``settings``: the YAML file and flags of ``post_train.py``
- ``chat``: chat template and tokens
- ``prompts``: prompts from files, and their evaluation
- ``rewards``: reward functions
- ``positions``: position ids under left padding
- ``report``: log lines and reward.png
"""
