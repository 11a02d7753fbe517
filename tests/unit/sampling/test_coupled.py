import numpy as np
import pytest
import torch

from paceline.sampling.coupled import sample_coupled, token_uniforms, verify_coupled
from paceline.sampling.goodness import chi_square_p_value

MAX_SEED = 2**64 - 1


def test_the_noise_is_fixed_forever():
    # A change here changes the text of every seeded run: it would be a breaking change, not a test to update.
    assert token_uniforms(0, 0, 3).tolist() == [0.011546754286331562, 0.24154919656271823, 0.11142585551493822]
    assert token_uniforms(MAX_SEED, 12_345, 2).tolist() == [0.832643599250613, 0.22333207350772055]


def test_the_noise_follows_the_published_generator():
    """Philox 4x64-10 from its definition (Salmon et al., SC 2011): the counter is incremented before each block."""
    seed, position = 42, 7
    expected = []
    for block in range(1, 4):
        expected += philox_4x64((block, 0, 0, 0), (seed, position))
    uniforms = [((word >> 12) + 0.5) * 2.0**-52 for word in expected]
    assert token_uniforms(seed, position, 12).tolist() == uniforms


def philox_4x64(counter, key):
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(right >> 64) ^ c[1] ^ k[0], right & mask, (left >> 64) ^ c[3] ^ k[1], left & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_a_larger_vocabulary_extends_the_noise():
    assert np.array_equal(token_uniforms(3, 9, 50_000)[:31], token_uniforms(3, 9, 31))


def test_the_noise_depends_on_seed_and_position():
    noise = {tuple(token_uniforms(seed, position, 4)) for seed in (0, 1, 2, MAX_SEED) for position in range(50)}
    assert len(noise) == 200


def test_the_noise_is_uniform_and_strictly_inside():
    uniforms = np.concatenate([token_uniforms(seed, 0, 10_000) for seed in range(20)])
    assert uniforms.min() > 0.0
    assert uniforms.max() < 1.0
    counts = np.histogram(uniforms, bins=64, range=(0.0, 1.0))[0]
    assert chi_square_p_value(counts, np.full(64, 1 / 64)) > 1e-3


def test_the_extreme_words_stay_inside():
    for word in (0, 2**64 - 1):
        uniform = (float(np.uint64(word) >> np.uint64(12)) + 0.5) * 2.0**-52
        assert 0.0 < uniform < 1.0


def test_the_race_is_the_gumbel_argmax():
    probs = torch.rand(200, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for position in range(50):
        gumbel = -np.log(-np.log(token_uniforms(11, position, 200)))
        expected = int(np.argmax(np.log(probs.double().numpy()) + gumbel))
        assert sample_coupled(probs, 11, position) == expected


def test_a_token_of_probability_zero_never_wins():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5])
    assert {sample_coupled(probs, seed, 3) for seed in range(50)} == {1, 3}
    assert {sample_coupled(torch.tensor([0.0, 0.0, 1.0]), seed, 3) for seed in range(20)} == {2}


def test_a_row_without_mass_is_an_engine_error():
    with pytest.raises(AssertionError):
        sample_coupled(torch.zeros(3), 1, 1)


def test_padding_changes_nothing():
    probs = torch.rand(100, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([probs, torch.zeros(28)])
    for position in range(30):
        assert sample_coupled(probs, 5, position) == sample_coupled(padded, 5, position)


def test_the_targets_own_samples_decide():
    rows = torch.rand(4, 12, generator=torch.Generator().manual_seed(2)).softmax(-1)
    own = [sample_coupled(row, 9, 20 + i) for i, row in enumerate(rows)]

    def wrong(token_id):
        return (token_id + 1) % 12

    full = verify_coupled(rows, own[:3], 9, 20)
    assert (list(full.token_ids), full.num_accepted, full.final_token) == (own, 3, "bonus")
    partial = verify_coupled(rows, [own[0], wrong(own[1]), own[2]], 9, 20)
    assert (list(partial.token_ids), partial.num_accepted, partial.final_token) == (own[:2], 1, "recovered")
    none = verify_coupled(rows, [wrong(own[0]), own[1], own[2]], 9, 20)
    assert (list(none.token_ids), none.num_accepted) == (own[:1], 0)
    last = verify_coupled(rows, [*own[:2], wrong(own[2])], 9, 20)
    assert (list(last.token_ids), last.num_accepted, last.final_token) == (own[:3], 2, "recovered")
    assert verify_coupled(rows[:1], [], 9, 20).token_ids == (own[0],)


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        verify_coupled(torch.ones(2, 3), [], 1, 1)
