# AdamW's side of Muon with learning rates of its own: factors for embeddings (and head), positions, norms and biases.
EMBEDDINGS = 1.0
POSITIONS = 1.0
VECTORS = 1.0

from pretrain.optim import muon, schedule


def _groups(model, record, weight_decay, old=muon.groups):
    hidden = [group for group in old(model, record, weight_decay) if group.get("parts")]
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {parameter for group in hidden for parameter in group["params"]}
    for parameter, name in names.items():
        if parameter not in held:
            factor = POSITIONS if "wpe" in name else EMBEDDINGS if parameter.dim() >= 2 else VECTORS
            decay = weight_decay if parameter.dim() >= 2 else 0.0
            hidden.append({"params": [parameter], "weight_decay": decay, "factor": factor})
    return hidden


def _set_lr(optimizer, learning_rate):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("factor", 1.0)


muon.groups, schedule.set_lr = _groups, _set_lr
