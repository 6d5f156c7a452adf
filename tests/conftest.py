import pytest
from reference import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that is here."""
    return request.param
