"""The model and its operations: attention in blocks, head and cross-entropy, orthogonalising."""

import math
import re

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from gpt import ForwardOptions, GPTModel
from ops.add_bias import AddBias
from ops.block_attention import BLOCK_ROWS, block_attention
from ops.linear_cross_entropy import linear_cross_entropy, token_sum
from ops.orthogonalise import orthogonalise
from run_config import ModelConfig, load_run
from tests.support.workplace import PROJECT_DIR, TINY_MODEL

N, C, V, CHUNK = 256, 16, 1009, 64
FORMS = {"whole": {"multiple": 128}, "in chunks": {"chunk_tokens": CHUNK, "multiple": 128}}


def tiny_model(**changes):
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"drop_rate": 0.0} | changes))


def test_gpt2_init_scales_the_residual_projections():
    block = tiny_model(emb_dim=128, n_layers=8).blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.attention.output, block.mlp.output):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert not projection.bias.any()


@pytest.mark.parametrize("tie_weights", [False, True])
def test_zero_projections_start_with_the_loss_of_a_uniform_guess(tie_weights):
    model = tiny_model(init="zero_projections", tie_weights=tie_weights)
    for block in model.blocks:
        assert not block.attention.output.weight.any() and not block.mlp.output.weight.any()
        assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert model.token_embedding.weight.any(), "a tied head is the embedding"
    token_ids = torch.randint(0, model.config.vocab_size, (2, 9))
    loss = model(token_ids[:, :-1], token_ids[:, 1:])
    assert abs(loss.item() - math.log(model.config.vocab_size)) < (0.2 if tie_weights else 1e-5)
    loss.backward()
    assert model.head_weight.grad.any() or tie_weights


def test_the_original_has_163_million_parameters():
    with torch.device("meta"):
        model = GPTModel(load_run(PROJECT_DIR / "runs", "original").model)
    assert model.config.num_parameters == 163_009_536
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()  # and no mask


@pytest.mark.parametrize("length", [1, 16, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS - 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_in_blocks_computes_what_pytorch_does(length, dtype, tolerance):
    def output_and_gradients(attention, dtype):
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(2, length, 3, 4, 8, generator=generator).to(dtype).requires_grad_()
        output = attention(*qkv.permute(2, 0, 3, 1, 4).unbind())  # strided, as in the model
        (output.float() * torch.randn(output.shape, generator=generator)).sum().backward()
        assert output.dtype == dtype and output.shape == (2, 4, length, 8)
        return [output.detach().float(), qkv.grad.float()]

    ours = output_and_gradients(lambda *qkv: block_attention(*qkv, drop_rate=0.0), dtype)
    exact = output_and_gradients(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), torch.float32
    )
    for found, wanted in zip(ours, exact, strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_a_bias_that_is_added_apart_changes_neither_the_loss_nor_a_gradient():
    values = []
    for options in (ForwardOptions(), ForwardOptions(adds_bias_apart=True)):
        torch.manual_seed(0)
        model = GPTModel(ModelConfig(**TINY_MODEL | {"drop_rate": 0.0}), options)
        for block in model.blocks:
            torch.nn.init.normal_(block.mlp.up.bias)
        token_ids = torch.randint(0, 257, (3, 17), generator=torch.Generator().manual_seed(0))
        loss = model(token_ids[:, :-1], token_ids[:, 1:])
        loss.backward()
        values.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(values[1], values[0])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = AddBias.apply(torch.ones(1, 2, 8, dtype=torch.bfloat16), torch.ones(8))
    assert hidden.dtype == torch.bfloat16  # not promoted to the bias's


def inputs(x_dtype=torch.float32, num_tokens=N):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, C, generator=generator).to(x_dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator).requires_grad_()
    return x, weight, torch.randint(V, (num_tokens,), generator=generator)


def with_gradients(loss, *tensors):
    scaled = loss * 8 / 3  # factors of a gradient scaler and of accumulation
    return [loss.detach(), *torch.autograd.grad(scaled, tensors)]


def found(precision, x_dtype, function=linear_cross_entropy, **options):
    x, weight, targets = inputs(x_dtype)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        return with_gradients(function(x, weight, targets, **options), x, weight)


def exact(x_dtype=torch.float32):
    x, weight, targets = inputs(x_dtype)
    return with_gradients(F.cross_entropy(F.linear(x.float(), weight), targets), x, weight)


def assert_close(values, tolerance, x_dtype=torch.float32):
    assert [value.dtype for value in values] == [torch.float32, x_dtype, torch.float32]
    for value, wanted in zip(values, exact(x_dtype), strict=True):
        assert (value.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()


@pytest.mark.parametrize(
    ("chunk_tokens", "multiple"), [(None, 1), (None, 64), (1, 1), (100, 64), (N + 1, 1)]
)
@pytest.mark.parametrize(
    ("precision", "x_dtype", "tolerance"),
    [
        (None, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float32, 2e-3),
    ],
)
def test_loss_and_gradients_are_those_of_float32(
    chunk_tokens, multiple, precision, x_dtype, tolerance
):
    values = found(precision, x_dtype, chunk_tokens=chunk_tokens, multiple=multiple)
    assert_close(values, tolerance, x_dtype)
    assert values[0] != values[0].bfloat16()  # not rounded to two digits


def compiled(**options):
    """Check the compiled form; return "(shape) dtype" of each buffer that its code allocates."""
    function = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=False)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),  # else there is no code to see
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compiler.reset()
        values, codes = run_and_get_code(
            lambda: found(torch.bfloat16, torch.bfloat16, function, **options)
        )
    assert_close(values, 0.015, torch.bfloat16)
    made = re.findall(r"= empty_strided_\w+\((\(.*?\)), \(.*?\), torch\.(\w+)", "\n".join(codes))
    return [f"{shape} {dtype}" for shape, dtype in made]


@pytest.mark.thorough
def test_whole_compiled_code_keeps_the_logits_in_low_precision_only():
    buffers = compiled(**FORMS["whole"])
    float32 = [name for name in buffers if name.endswith("float32")]
    # Largest logits and sums.
    assert [name for name in float32 if name.startswith(f"({N}, ")] == [f"({N}, 1) float32"] * 2
    assert buffers.count(f"({N}, 1024) bfloat16") == 1


@pytest.mark.thorough
def test_compiled_code_in_chunks_uses_one_buffer_in_turn():
    sizes = [
        name
        for name in compiled(**FORMS["in chunks"])
        if name.startswith((f"({N}, 10", f"({CHUNK}, 10"))
    ]
    assert sizes == [f"({CHUNK}, 1024) bfloat16"]


@pytest.mark.parametrize(
    "backend", [None, "eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_large_logits_are_exact(options, backend):
    function = (
        linear_cross_entropy
        if backend is None
        else torch.compile(linear_cross_entropy, backend=backend, dynamic=False)
    )
    x, weight, targets = (
        tensor.detach() * 100 if tensor.is_floating_point() else tensor for tensor in inputs()
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = function(x, weight, targets, **options)
    expected = F.cross_entropy((x @ weight.T).double(), targets)
    grads, wanted = (torch.autograd.grad(value, (x, weight)) for value in (loss, expected))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(function(x, weight, targets, **options), loss)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 2**17])
def test_sums_over_many_tokens_do_not_overflow_in_fp16(chunk_tokens, compiles):
    """The logits are equal, and most tokens have the first of five targets."""
    function = (
        linear_cross_entropy
        if not compiles
        else torch.compile(linear_cross_entropy, backend="eager", dynamic=False)
    )
    targets = torch.zeros(2**17, dtype=torch.int64)
    targets[::4] = 1
    x, weight = torch.full((2**17, 2), 2.0), torch.zeros(5, 2)
    with torch.autocast("cpu", torch.float16):
        loss = function(
            x.requires_grad_(), weight.requires_grad_(), targets, chunk_tokens=chunk_tokens
        )
    (loss * 2**14).backward()  # as a gradient scaler does; in the whole form, else they vanish
    shares = torch.tensor([0.75, 0.25, 0, 0, 0])
    torch.testing.assert_close(
        weight.grad / 2**14, (2 * (0.2 - shares))[:, None].expand(5, 2), rtol=2e-3, atol=0
    )
    # The device without memory has the operators of GPUs.
    for dtype, wanted in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        grad, x = (torch.empty(6, n, dtype=dtype, device="meta") for n in (5, 4))
        assert token_sum(grad, x).dtype == wanted and token_sum(grad, x).shape == (5, 4)


class Recorder(TorchDispatchMode):
    """Keeps the sizes of all results, and the sizes in matrix products."""

    def __init__(self):
        super().__init__()
        self.results, self.products = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.results.append(tensor.numel())
        if function.name().startswith("aten::mm"):
            self.products.append({*args[0].shape, *args[1].shape})
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_every_matrix_product_has_the_padded_head_and_no_tensor_all_logits(trains):
    x, weight, targets = inputs(num_tokens=40)
    with Recorder() as recorder, torch.set_grad_enabled(trains):
        linear_cross_entropy(x, weight, targets, chunk_tokens=10, multiple=64)
    assert recorder.products == [{10, C, 1024}] * (12 if trains else 4)
    assert max(recorder.results) == 1024 * C  # the head itself; a chunk has 10 * 1,024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_become_about_one_and_vectors_stay(dtype):
    """Each matrix is treated by itself, and one of zeros stays."""
    torch.manual_seed(0)
    matrices = torch.randn(3, 24, 96) * torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    assert not orthogonalise(torch.zeros(1, 4, 8, dtype=dtype)).any()
    result = orthogonalise(matrices.to(dtype))
    assert result.dtype == dtype and result.shape == matrices.shape
    singular_values = torch.linalg.svdvals(result.float())
    assert singular_values.min() > 0.85 and singular_values.max() < 1.15
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert F.cosine_similarity((u @ v).flatten(1), result.float().flatten(1)).min() > 0.99
