"""near_pairs tested by its contract: calls drawn from it, and the checks of all promises."""

import calcops.ops  # noqa: F401 - loads calcops_models
import contract_cases
import pytest

import calcops_jit

pytest.importorskip("hypothesis")

options = dict(seed=0, reference=contract_cases.reference, adjust=contract_cases.adjust)

test_near_pairs = calcops_jit.tests_of("calcops_models", "near_pairs", seconds=3, **options)
