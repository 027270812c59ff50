import pytest

from tests.serve.serving import serving


@pytest.fixture(scope="session")
def running():
    """One server for all tests that only ask it things."""
    with serving() as server:
        yield server
