import pytest
import torch

from ops.orthogonalise import orthogonalise


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
    assert torch.nn.functional.cosine_similarity(
        (u @ v).flatten(1), result.float().flatten(1)).min() > 0.99


def test_small_singular_values_are_raised_and_none_overshoots():
    values = torch.logspace(0, -5, 40)
    result = torch.linalg.svdvals(orthogonalise(torch.diag(values)[None]))[0]
    assert result.max() < 1.15
    assert (result > 0.7).sum() == (values > 1e-3 * values.norm()).sum()
