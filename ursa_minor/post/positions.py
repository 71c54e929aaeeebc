"""Positions of left-padded rows, which TRL leaves out where a model is trained on its own completions."""

from transformers import PreTrainedModel

from ursa_minor.model.architectures import ARCHITECTURES


def derive_positions(model: PreTrainedModel) -> None:
    """Make a model with learned positions count them from each row's first token, where nobody hands it positions.

    ``generate`` does so for left-padded prompts. TRL 1.16's GRPO and RLOO train with the mask alone, for which
    GPT2Model counts the padding too: log-probabilities are then those of other positions. The hook sits on the inner
    model, for TRL replaces the outer one's ``forward``. Rotary models compare distances only, and are left as they are.
    """
    record = ARCHITECTURES.get(model.config.model_type)
    if record is None or record.positions is None:
        return

    def count(module, args, kwargs):
        mask_BT = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and mask_BT is not None and mask_BT.ndim == 2:
            ids_BT = args[0] if args else kwargs["input_ids"]
            new = ids_BT.shape[1]  # a cache holds those before
            kwargs["position_ids"] = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        return args, kwargs

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)
