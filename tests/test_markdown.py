"""Where code is in Markdown, at every place of texts that come in pieces."""

import pytest

from dflash_mlx.markdown import Code


@pytest.mark.parametrize(
    ("text", "fenced", "span"),
    [
        ("", False, 0),
        ("a\nb", False, 0),
        # fences
        ("```", True, 3),
        ("```python", True, 3),
        ("```\n", True, 0),
        ("```\na\n", True, 0),
        ("```\na\n```", True, 3),
        ("```\na\n```\n", False, 0),
        ("```\na\n``` \t\r\nb", False, 0),
        ("```\na\n```b\n", True, 0),
        ("```\na\n``\n", True, 0),
        ("```\na\n~~~\n", True, 0),
        ("````\n```\n", True, 0),
        ("````\n`````\n", False, 0),
        ("~~~ `a` ```\n", True, 0),
        ("~~~\n```\n~~~\n", False, 0),
        ("~~\n", False, 0),
        ("``\n", False, 0),
        ("a ```\n", False, 0),
        ("  ```\na", True, 0),
        ("1. a\n   - ```\n     b\n     ```\n", False, 0),
        ("- ```\nb", True, 0),
        ("2) ~~~\nb", True, 0),
        ("> ```\n> b", True, 0),
        ("> ```\n> b\n> ```\n", False, 0),
        ("```\n- ```\n", True, 0),
        ("-```\n", False, 0),
        ("```a```\n", False, 0),
        ("```a`", False, 3),
        ("```" + "a" * 300 + "\n", True, 0),
        ("```\n" + "a" * 300 + "```\n", True, 0),
        # spans
        ("`", False, 1),
        ("`a", False, 1),
        ("``", False, 2),
        ("`a`", False, 0),
        ("`a``", False, 1),
        ("`a`` ` ``", False, 2),
        ("a ``b`c", False, 2),
        ("``b`c``", False, 0),
        ("`a\n", False, 0),
        ("`a\nb", False, 0),
        ("a```b", False, 3),
    ],
)
def test_what_comes_next_is_code(text: str, fenced: bool, span: int) -> None:
    for size in (1, 2, 3, 400):
        code = Code()
        for at in range(0, len(text), size):
            code.add(text[at : at + size])
        assert (code.fenced, code.span) == (fenced, span)
