"""The cards that the null card passes for are those that the product knows; needs no null card."""

import pytest
from described_cards import CARDS, PROCESSORS

from pretrain.base import cards


@pytest.mark.parametrize("name", sorted(set(CARDS) - {"unknown"}))
def test_a_card_is_known_to_the_product_by_its_drivers_name(name):
    described, known = CARDS[name], cards.find(CARDS[name].driver_name)
    assert known.name == name and known.capability == described.capability
    # What the driver leaves of the size that it is sold by.
    assert 0.9 * known.memory_gib * 1e9 / 2**30 <= described.memory_gib <= known.memory_gib


def test_the_unknown_card_is_unknown_and_each_kind_of_processor_has_a_card():
    assert cards.find(CARDS["unknown"].driver_name) is None
    assert {card.capability for card in CARDS.values()} == set(PROCESSORS)


def test_every_card_with_a_yaml_is_described():
    singles = {path.stem for path in cards.PRESETS.glob("*.yaml")} & {card.name for card in cards.CARDS}
    assert singles <= set(CARDS)
