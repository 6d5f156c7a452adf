"""ops/edge_force tested by its contract: calls drawn from it, and the checks of all promises."""

import contract_cases
import pytest

import calcops_jit

pytest.importorskip("hypothesis")

options = dict(seed=0, reference=contract_cases.reference, adjust=contract_cases.adjust)

test_edge_force = calcops_jit.tests_of("calcops", "*edge*", seconds=3, **options)
