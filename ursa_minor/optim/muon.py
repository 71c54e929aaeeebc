"""Muon: momentum whose every matrix is made orthogonal before it is applied; AdamW for all but hidden matrices.

Source: K. Jordan et al., https://kellerjordan.github.io/posts/muon/; the step's size is that of AdamW by the rule of
Liu et al., https://arxiv.org/abs/2502.16982. What each choice below brings:
benchmarks/results/muon-ablation-cpu-2026-11-22.json.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ursa_minor.model.architectures import ARCHITECTURES, Architecture
from ursa_minor.optim import adamw

# Jordan's: steepest at 0; singular values end between about 0.7 and 1.2.
QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)
ROUNDS = 5
# Elements of matrices that are updated together: limits the memory, and fills a GPU.
MOST_ELEMENTS = 2**26


def groups(model: nn.Module, architecture: Architecture, weight_decay: float) -> list[dict]:
    """Return the groups that ``Muon`` takes: hidden matrices by shape, then those of AdamW."""
    hidden: dict[tuple, list[nn.Parameter]] = {}
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if adamw.is_hidden_matrix(name, parameter, architecture):
            parts = next(
                (count for ending, count in architecture.fused.items() if name.endswith(ending)), 1
            )
            hidden.setdefault((parts, *parameter.shape), []).append(parameter)
        else:
            others.append((name, parameter))
    muon_groups = [
        {
            "params": params,
            "weight_decay": weight_decay,
            "parts": count,
            "scale": step_scale(rows, columns // count),
        }
        for (count, rows, columns), params in hidden.items()
    ]
    return [*muon_groups, *adamw.groups(others, weight_decay)]


def step_scale(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix the size of AdamW's steps, 0.2 root mean square."""
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.AdamW):
    """AdamW (fused) that updates the groups with ``parts`` by Muon instead; without such groups all is AdamW's.

    One optimizer for both, so that there is one state to save and one step to take or skip.

    Args:
        groups: those with ``parts`` hold matrices of one shape: how many maps lie side by side in their columns, and
            ``scale``, the factor that the learning rate gets.
        momentum: of Muon, by Nesterov's rule.
        settings: of ``torch.optim.AdamW``.
    """

    def __init__(self, groups: list[dict], *, momentum: float, **settings):
        defaults = {"parts": 0, "scale": 1.0, "momentum": momentum}
        super().__init__([defaults | group for group in groups], fused=True, **settings)

    def __setstate__(self, state: dict) -> None:
        # AdamW's method expects moments in every state.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient. Muon sets the gradients of its own parameters to None."""
        for group in self.param_groups:
            if not group["parts"]:
                continue
            for batch in _batches(group["params"]):
                self._update(batch, group, self.state)
                for parameter in batch:
                    parameter.grad = None
        super().step(closure)  # AdamW skips parameters without a gradient

    @staticmethod
    def _update(parameters: list[nn.Parameter], group: dict, state: dict) -> None:
        updates = []
        for parameter in parameters:
            if "momentum_buffer" not in state[parameter]:
                state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            average = state[parameter]["momentum_buffer"].lerp_(
                parameter.grad, 1 - group["momentum"]
            )
            update = parameter.grad.lerp(average, group["momentum"])
            updates.append(update.full_tensor() if isinstance(update, DTensor) else update)
        stack = torch.stack(updates)  # (matrices, rows, columns)
        stack = torch.cat(stack.chunk(group["parts"], dim=-1))
        stack = orthogonalize(stack.to(_product_dtype(stack.device)))
        stack = torch.cat(stack.chunk(group["parts"]), dim=-1)
        for parameter, update in zip(parameters, stack, strict=True):
            # Each process has computed the full matrix and takes its rows.
            if isinstance(parameter, DTensor):
                whole = DTensor.from_local(
                    update, parameter.device_mesh, [Replicate()], run_check=False
                )
                update = whole.redistribute(placements=parameter.placements)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * group["scale"])


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that have gradients in lists of at most ``MOST_ELEMENTS`` elements, or of one parameter."""
    batch: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if batch and elements + parameter.numel() > MOST_ELEMENTS:
            yield batch
            batch = []
            elements = 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch


def _product_dtype(device: torch.device) -> torch.dtype:
    """Return the type that products are computed in: half precision is enough, and a card's tensor cores are made for it.

    Cards before Ampere have no bf16 (torch would emulate it 20 times slower). On a CPU fp32 is both faster and closer.
    """
    if device.type != "cuda":
        return torch.float32
    return (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return (n, rows, columns) matrices with about the same singular vectors and singular values near 1.

    Newton-Schulz iteration with Jordan's quintic, all matrices at once, on the shorter side.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True, dtype=torch.float32).clamp(min=1e-7).to(
        x.dtype
    )
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class TrainerMuon:
    """Muon for Transformers' own loop: ``Trainer(..., optimizer_cls_and_kwargs=(TrainerMuon, {"lr": 0.01}))``.

    A factory, as ``transformers.trainer_optimizer.is_optimizer_factory`` describes it: Trainer makes it without
    arguments, and calls it with its model and the given ones. Query, key and value of a GPT-2 are made orthogonal each.
    """

    def __call__(
        self, model: nn.Module, *, lr: float, weight_decay: float = 0.1, **settings
    ) -> Muon:
        """Return the optimizer of a model's weights. Raises ValueError for a model that is neither GPT-2 nor Llama.

        Args:
            settings: momentum (default: 0.95), and AdamW's betas (0.9, 0.95) and eps (1e-8).
        """
        kind = model.config.model_type
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"model_type = {kind}: Muon knows the hidden matrices of {', '.join(ARCHITECTURES)}"
            )
        more: dict[str, Any] = {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8} | settings
        return Muon(groups(model, ARCHITECTURES[kind], weight_decay), lr=lr, **more)
