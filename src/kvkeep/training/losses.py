"""The losses of prediction: stay close to the full cache, predict the next token. Logits exist in blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def prediction_losses(
    head: Callable[[Tensor], Tensor], student: Tensor, teacher: Tensor, targets: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL to the teacher, next-token loss of the student, next-token loss of the teacher.

    Parameters
    ----------
    head
        Hidden states ``[tokens, hidden_size]`` to logits ``[tokens, vocabulary]``.
    student, teacher
        Last hidden states of the tokens that count ``[tokens, hidden_size]``.
    targets
        int64 ``[tokens]``.
    block
        Tokens whose logits exist at once; the backward pass computes them again.

    Returns
    -------
    tuple
        Means over tokens, in nats; the last without gradient.
    """
    sums = student.new_zeros(3, dtype=torch.float32)
    for begin in range(0, len(targets), block):
        part = slice(begin, begin + block)
        given = (student[part], teacher[part], targets[part])
        if len(targets) <= block:
            sums = sums + _sums(head, *given)
        else:
            sums = sums + checkpoint(_sums, head, *given, use_reentrant=False)
    kl, next_token, full = sums / max(len(targets), 1)
    return kl, next_token, full.detach()


def _sums(head: Callable[[Tensor], Tensor], student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = head(teacher).log_softmax(-1)
    found = head(student).log_softmax(-1)
    kl = F.kl_div(found, wanted, reduction="sum", log_target=True)
    full = F.nll_loss(wanted, targets, reduction="sum")
    return torch.stack([kl, F.nll_loss(found, targets, reduction="sum"), full])
