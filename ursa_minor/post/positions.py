"""Position ids of left-padded rows, which TRL's trainers do not pass to the model."""

from transformers import PreTrainedModel

from ursa_minor.model.architectures import ARCHITECTURES


def derive_positions(model: PreTrainedModel) -> None:
    """Make a model with learned positions compute its position ids from the attention mask.

    The first token of each row gets position 0, as ``generate`` does it for left-padded prompts.
    GRPO and RLOO of TRL 1.16 train with the attention mask alone. GPT2Model then counts the padding
    too, so the log-probabilities are those of wrong positions.

    Models with rotary embeddings are not changed, because only the distance between two tokens
    matters to them. Position ids that the caller passes are not changed either.
    """
    architecture = ARCHITECTURES.get(model.config.model_type)
    if architecture is None or architecture.positions is None:
        return

    def add_position_ids(module, args, kwargs):
        mask_BT = kwargs.get("attention_mask")
        has_row_mask = mask_BT is not None and mask_BT.ndim == 2
        if kwargs.get("position_ids") is None and has_row_mask:
            positions_BT = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
            # With a key-value cache, the mask also covers the cached tokens, but the ids do not.
            ids_BT = args[0] if args else kwargs["input_ids"]
            num_new_ids = ids_BT.shape[1]
            kwargs["position_ids"] = positions_BT[:, -num_new_ids:]
        return args, kwargs

    # The hook is on the inner model, because TRL replaces ``forward`` of the outer one.
    model.base_model.register_forward_pre_hook(add_position_ids, with_kwargs=True)
