"""What users meet."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Switch off the run-time check of shapes and types, which users don't have: bad input reaches the library."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
