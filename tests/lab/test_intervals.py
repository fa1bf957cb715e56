"""95% intervals of shares and of ratios."""

import numpy as np
import pytest

from lab.evaluate.held_out import BLOCK_TOKENS
from lab.evaluate.intervals import ratio, share


@pytest.mark.parametrize(("right", "questions", "interval"), [
    (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)),  # 1 / (1 + n / z^2), and 1 minus that
    (81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)),  # Newcombe 1998, table I
    (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718)),
])
def test_wilsons_interval_is_the_published_one(right, questions, interval):
    found = share(np.arange(questions) < right)
    assert found.value == right / questions and found.interval == pytest.approx(interval, abs=6e-5)


def test_a_short_last_sequence_counts_by_its_tokens():
    losses, tokens = np.array([24.0, 30.0, 36.0, 6.0]), np.array([8, 8, 8, 2])
    mean = 96 / 26
    half = 3.182 * np.sqrt(4 / 3 * ((losses - mean * tokens)**2).sum()) / 26
    assert ratio(losses, tokens).interval == pytest.approx((mean - half, mean + half))


def test_blocks_cover_the_true_mean_of_losses_that_resemble_their_neighbours():
    """Losses of 1,024-token sequences, each with half of the deviation of the one before."""
    random = np.random.default_rng(0)
    samples, steps = np.zeros((1000, 640)), random.normal(size=(1000, 640))
    samples[:, 0] = steps[:, 0] / np.sqrt(1 - 0.5**2)
    for place in range(1, 640):
        samples[:, place] = 0.5 * samples[:, place - 1] + steps[:, place]
    covered = {}
    for block in (1, BLOCK_TOKENS // 1024):
        sums = samples.reshape(1000, -1, block).sum(axis=2)
        counts = np.full(sums.shape[1], block)
        intervals = [ratio(sample, counts).interval for sample in sums]
        covered[block] = np.mean([low < 0 < high for low, high in intervals])
    assert covered[1] < 0.80 and covered[BLOCK_TOKENS // 1024] == pytest.approx(0.945, abs=0.02)


def test_without_a_spread_to_measure_there_is_no_interval():
    assert ratio(np.array([3.0]), np.array([8])).interval is None
    for wrong in (np.nan, np.inf):
        assert ratio(np.array([wrong, 1.0]), np.ones(2)).interval is None
    assert ratio(np.full(3, 0.1), np.full(3, 7)).interval == pytest.approx((0.1 / 7, 0.1 / 7))
