"""The Hugging Face Hub: push, fetch, the model card."""
