"""GPT-2 and Llama-type models of Transformers, their loss, and the files that the ecosystem loads."""
