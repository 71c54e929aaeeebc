"""Read parts of the definition of a tokenizer, as tokenizer.json contains them.

Serializing a complete tokenizer is slow, because it includes the vocabulary.
"""

import json
from typing import Any

from tokenizers import Tokenizer


def component(backend: Tokenizer, name: str) -> dict[str, Any] | None:
    """Return the normalizer, pre_tokenizer, decoder or post_processor, or None if there is none."""
    part = getattr(backend, name)
    return None if part is None else json.loads(part.__getstate__())


def complete(backend: Tokenizer) -> dict[str, Any]:
    """Return the complete definition."""
    return json.loads(backend.to_str())
