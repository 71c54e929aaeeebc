"""curves.png is drawn from whatever rows a run has."""

import pytest

from pretrain.plots import draw_curves

TRAIN = [{"step": s, "tokens": 8 * s, "train/loss": 3.0, "train/lr": 0.1, "tokens_per_second": 5.0} for s in (1, 2)]
LOOK = {"step": 2, "tokens": 16, "eval/loss": 2.5}


@pytest.mark.parametrize("rows", [[*TRAIN, LOOK], TRAIN, [LOOK], [*TRAIN, {"step": 3}]])
def test_curves_are_a_png(tmp_path, rows):
    draw_curves(rows, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "tokens": 0}], [{"step": 1, "train/loss": 2.0}]])
def test_nothing_is_drawn_from_nothing(tmp_path, rows):
    draw_curves(rows, tmp_path / "curves.png", "a run")
    assert not list(tmp_path.iterdir())
