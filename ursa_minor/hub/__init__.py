"""Push to the Hugging Face Hub and pull from it.

- ``client``: the client of the Hub with timeouts, retries and one-line errors
- ``push``: stage pushes on disk and send them
- ``pull``: download a pushed checkpoint
- ``model_card``: write the README.md of a push
- ``export_card``: write the README.md of an export
- ``origin``: find the run of a model that is exported
- ``card_metadata``: read and change the metadata block of a README.md
- ``card_merge``: merge a new README.md into the one on the Hub without losing edits
- ``card_scores``: add evaluation results to a README.md on the Hub
"""
