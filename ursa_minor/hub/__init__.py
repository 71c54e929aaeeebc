"""Push to the Hugging Face Hub and pull from it.

- ``client``: the Hub's client with timeouts, retries and one-line errors
- ``push``: stage and send pushes
- ``pull``: fetch a checkpoint
- ``model_card``, ``card_metadata``, ``card_merge``, ``card_scores``: README.md of a model, without losing edits
"""
