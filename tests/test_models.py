"""docs/models.md says what is so."""

import pytest
from model_table import PAGE, published_line, zoo_line
from published import TARGETS
from zoo import models

LINES = PAGE.read_text(encoding="utf-8").splitlines()
RENEW = "run scripts/write_model_table.py"


@pytest.mark.parametrize("name", TARGETS)
def test_published_targets_do_with_their_drafters_what_the_page_says(name: str) -> None:
    assert published_line(name) in LINES, RENEW


@pytest.mark.parametrize("name", models())
def test_mlx_lms_models_do_what_the_page_says(name: str) -> None:
    assert zoo_line(name) in LINES, RENEW


def test_the_tables_have_no_other_lines() -> None:
    for table, names in (("published", TARGETS), ("mlx-lm", models())):
        start = LINES.index(f"<!-- models: {table} -->")
        assert LINES.index("<!-- end -->", start) - start == len(names) + 3, RENEW
