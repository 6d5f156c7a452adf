"""examples/warp_perspective: the page is straightened, and two views are registered to 1/20 of a
pixel."""

import re
import sys

import pytest
import torch
from programs import ROOT, assert_shows_something, blocks, run

for package in ("matplotlib", "skimage"):
    pytest.importorskip(package)

FOLDER = ROOT / "examples" / "warp_perspective"
sys.path.append(str(FOLDER))
from register import error, register, views  # noqa: E402
from straighten import homography, straighten  # noqa: E402


def test_a_homography_maps_four_points_to_four_points():
    source, target = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    mapped = torch.cat([source, torch.ones(4, 1)], 1) @ homography(source, target).T
    torch.testing.assert_close(mapped[:, :2] / mapped[:, 2:], target, rtol=0, atol=1e-12)


def test_the_ruled_lines_of_the_page_are_rows_of_the_result():
    """Between the two ruled lines, the photograph shows paper and writing."""
    straight = straighten()[1].double()
    assert straight.shape == (344, 680)
    # A horizontal line darkens a whole row of the result. This row is darker than the rows 12
    # pixels above and below.
    row = straight[:, 60:620].median(dim=1).values
    for line in (110, 210):
        assert row[line - 4 : line + 5].min() < min(row[line - 12], row[line + 12]) - 15


def drawn(script, folder):
    printed = run(sys.executable, FOLDER / script, folder).stdout
    assert_shows_something(printed.splitlines()[-1], 200, 900)
    return printed


def test_the_photograph_is_drawn_before_and_after(tmp_path):
    drawn("straighten.py", tmp_path)


def test_views_40_pixels_apart_are_registered_to_a_twentieth_as_the_readme_shows(tmp_path):
    printed = drawn("register.py", tmp_path)
    starts = [float(x) for x in re.findall(r"from +(\S+) pixels off", printed)]
    assert len(starts) == 5
    assert starts[0] >= 40
    assert float(re.search(r"registered: (\S+) pixels off", printed)[1]) < 0.05
    (shown,) = blocks("examples/warp_perspective/README.md", "text")
    for line in shown.splitlines():
        assert re.sub(r"[\d.]+ pixels off", "", line).rstrip() in printed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_views_moved_in_any_direction_are_registered(seed):
    angle = 2 * torch.pi * torch.rand(4, generator=torch.Generator().manual_seed(seed)).double()
    moved = 40 * torch.stack([angle.cos(), angle.sin()], 1)
    assert error(register(*views(moved))[-1][1], moved) < 0.05
