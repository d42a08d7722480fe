"""Attention with fading entries against a double loop, and against what it must turn into."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.kernels import retention_attention_flex
from kvkeep.kernels.retention_attention import Packing, retention_attention_blocks


def packing(lengths: list[list[int]]) -> Packing:
    """Rows of documents of these lengths; a negative length is padding."""
    documents = [
        [nth if n > 0 else -1 for nth, n in enumerate(row) for _ in range(abs(n))] for row in lengths
    ]
    positions = [[place for n in row for place in range(abs(n))] for row in lengths]
    return Packing(torch.tensor(documents), torch.tensor(positions))


def double_loop(
    query: Tensor, key: Tensor, value: Tensor, log_beta: Tensor, packed: Packing, scale: float
) -> Tensor:
    """The definition, entry by entry."""
    group = query.shape[1] // key.shape[1]
    rows = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for t in range(query.shape[2]):
                seen = [j for j in range(t + 1) if packed.documents[b, j] == packed.documents[b, t]]
                logits = [
                    scale * (query[b, h, t] @ key[b, h // group, j]) + (t - j) * log_beta[b, h // group, j]
                    for j in seen
                ]
                weights = torch.stack(logits).softmax(0)
                rows.append(sum(w * value[b, h // group, j] for w, j in zip(weights, seen, strict=True)))
    return torch.stack(rows).view(*query.shape[:3], -1)


def tensors(tokens: int, seed: int, batch: int = 2, fastest: float = 2.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_beta = -fastest * torch.rand(batch, 2, tokens, generator=generator, dtype=torch.float64)
    drawn = draw(batch, 4, tokens, 3), draw(batch, 2, tokens, 3), draw(batch, 2, tokens, 5), log_beta
    return tuple(each.requires_grad_() for each in drawn)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1, 2, 3, 5, 64]))
def test_equals_the_double_loop_with_gradients(seed: int, block: int) -> None:
    packed = packing([[4, 3, -2], [1, 8]])
    mine, theirs = tensors(9, seed), tensors(9, seed)
    out = retention_attention_blocks(*mine, packed, 0.6, block)
    expected = double_loop(*theirs, packed, 0.6)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for here, there in zip(mine, theirs, strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=0, atol=1e-11)


def test_gradients_by_finite_differences() -> None:
    packed = packing([[3, 3]])
    assert torch.autograd.gradcheck(
        lambda *given: retention_attention_blocks(*given, packed, 0.7, 4), tensors(6, 3, batch=1)
    )


def test_nothing_fades_at_beta_one() -> None:
    query, key, value, _ = tensors(9, 5)
    out = retention_attention_blocks(query, key, value, torch.zeros(2, 2, 9), packing([[9], [9]]), 0.5, 4)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)


def test_only_the_own_token_is_left_when_all_fade_at_once() -> None:
    query, key, value, _ = tensors(9, 5)
    out = retention_attention_blocks(query, key, value, torch.full((2, 2, 9), -1e4), packing([[9], [9]]), 0.5)
    torch.testing.assert_close(out, value.repeat_interleave(2, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    exact = [each.detach() for each in tensors(300, 8, batch=1, fastest=0.02)]
    halves = [each.to(dtype) for each in exact[:3]]
    packed = packing([[300]])
    out = retention_attention_blocks(*halves, exact[3].float(), packed, 0.6)
    expected = retention_attention_blocks(*(each.double() for each in halves), exact[3], packed, 0.6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_says_the_same() -> None:
    query, key, value, log_beta = (each.detach().float() for each in tensors(40, 2))
    packed = packing([[25, 12, -3], [40]])
    out = retention_attention_flex.attend(query, key, value, log_beta, packed.documents, 0.6, compiled=False)
    expected = retention_attention_blocks(query, key, value, log_beta, packed, 0.6)
    real = packed.real[:, None, :, None]
    torch.testing.assert_close(out * real, expected * real, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward pass needs a GPU")
def test_flex_attention_has_the_same_gradients() -> None:
    packed = packing([[200, 50, -6], [256]])
    packed = Packing(packed.documents.cuda(), packed.positions.cuda())
    given = [torch.randn(2, heads, 256, 64, device="cuda") for heads in (4, 2, 2)]
    given.append(-torch.rand(2, 2, 256, device="cuda") / 10)
    mine, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    out = retention_attention_flex.attend(*mine, packed.documents, 0.125)
    expected = retention_attention_blocks(*theirs, packed, 0.125)
    real = packed.real[:, None, :, None]
    for each in (out, expected):
        (each * real).square().sum().backward()
    for here, there in zip(mine, theirs, strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=2e-2, atol=2e-2)
