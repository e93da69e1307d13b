"""The rows that studies/conformance.py computes are those of studies/conformance.md."""

from pathlib import Path

import pytest

from studies.conformance import CLAIMS, lines

PAGE = Path(__file__).parents[1] / "studies" / "conformance.md"


# DrJAX 0.2 asks jax for the mesh in a way that jax 0.10 deprecates.
@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")
@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_has_what_is_computed(name):
    if name == "drjax":
        pytest.importorskip("drjax", reason="not installed; run make conformance")
    page = PAGE.read_text("utf-8").splitlines()
    assert lines(name) == [line for line in page if line.startswith(f"| {name} |")]
