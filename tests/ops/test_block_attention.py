import pytest
import torch
import torch.nn.functional as F

from ops.block_attention import block_attention
from ops.sizes import BLOCK_ROWS


def output_and_gradients(attention, length, dtype):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, length, 3, 4, 8, generator=generator).to(dtype).requires_grad_()
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # strided, as the model has them
    output = attention(q, k, v)
    (output.float() * torch.randn(output.shape, generator=generator)).sum().backward()
    assert output.dtype == dtype and output.shape == (2, 4, length, 8)
    return [output.detach().float(), qkv.grad.float()]


@pytest.mark.parametrize("length", [1, 16, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS - 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_computes_what_pytorch_does(length, dtype, tolerance):
    ours = output_and_gradients(
        lambda *qkv: block_attention(*qkv, drop_rate=0.0), length, dtype)
    exact = output_and_gradients(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), length, torch.float32)
    for found, wanted in zip(ours, exact, strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()
