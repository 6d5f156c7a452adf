import pytest
from checkout import Checkout, the_zygote
from reference import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that is here."""
    return request.param


@pytest.fixture
def checkout(tmp_path):
    """A copy of the loader that a test may edit and build with."""
    return Checkout(the_zygote(), tmp_path)
