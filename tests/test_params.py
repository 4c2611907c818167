"""Sampling settings: what is refused, by name, value and range."""

from typing import Any

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.params import SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("repetition_penalty", 10**400),
    ("logit_bias", {1: -(10**400)}),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", 2.5),
    ("min_p", 1),
    ("min_p", -0.1),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", 1.0),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", [1]),
    ("stop", [""]),
    ("stop", [3]),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_setting_out_of_range_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, UsageError)
    assert repr(tuple(value) if name == "stop" else value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_defaults_are_greedy_and_unlimited() -> None:
    params = SamplingParams()
    assert params.max_tokens is None
    assert params.temperature == 0


@pytest.mark.parametrize(("asked", "used"), [(1e-46, 0), (9e-7, 0), (1e-6, 1e-6), (0.5, 0.5), (1, 1)])
def test_a_temperature_too_low_to_divide_by_is_greedy(asked: float, used: float) -> None:
    assert SamplingParams(temperature=asked).temperature == used


def test_one_stop_string_need_not_be_a_list_and_settings_cannot_be_changed_from_outside() -> None:
    bias = {5: 1.0}
    params = SamplingParams(stop="end", logit_bias=bias)
    bias[5] = 9.0
    assert params.stop == ("end",)
    assert params.logit_bias == {5: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 2.0  # type: ignore[index]
