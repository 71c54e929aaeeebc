"""Names in a run folder."""

import pytest

from ursa_minor.base.run_files import tokens_name


@pytest.mark.parametrize(
    ("step", "tokens_per_step", "expected"),
    [
        (0, 524_288, "tokens-0"),
        (1, 128, "tokens-100"),
        (10, 100, "tokens-1K"),
        (306, 32_768, "tokens-10M"),
        (2862, 524_288, "tokens-1.5B"),
        (1000, 524_288, "tokens-524M"),
        (1, 1, "tokens-1"),
    ],
)
def test_tag_is_roundest_number_that_step_reaches(step, tokens_per_step, expected):
    assert tokens_name(step, tokens_per_step) == expected


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000, 524_288])
def test_tags_of_steps_differ(tokens_per_step):
    names = {tokens_name(step, tokens_per_step) for step in range(2000)}

    assert len(names) == 2000
