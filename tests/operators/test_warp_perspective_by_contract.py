"""warp_perspective tested by its contract: calls drawn from it, and the checks of all promises."""

import contract_cases
import pytest

import calcops_jit

pytest.importorskip("hypothesis")

options = dict(seed=0, reference=contract_cases.reference, adjust=contract_cases.adjust)

test_warp_perspective = calcops_jit.tests_of("calcops", "*warp_perspective*", seconds=3, **options)
