"""A wrong value of a setting is said with its name, where it is read."""

import pytest

from cpcompile import config
from cpcompile.errors import OptionError
from cpcompile.settings import setting, setting_names

WRONG = [
    ("agreement_timeout_seconds", "60"),
    ("agreement_timeout_seconds", 0),
    ("agreement_timeout_seconds", float("nan")),
    ("agreement_timeout_seconds", True),
    ("tie_fraction", None),
    ("tie_fraction", -0.1),
    ("hardware", 3),
    ("hardware", ""),
    ("eager_strategy", "ulysses"),
    ("step_kernel", ["triton"]),
    ("check_overlap", 1),
]


def test_every_setting_has_a_rule_that_its_default_meets():
    assert {*setting_names()} == {*config.get_config_copy()} - {"TYPE_CHECKING"}
    for name in setting_names():
        assert setting(name) == getattr(config, name)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values(name, value):
    with config.patch({name: value}), pytest.raises(OptionError) as caught:
        setting(name)
    text = f"cpcompile.config.{name} is {value!r}; needed "
    assert str(caught.value).startswith(text)


def text_of(name, value):
    with config.patch({name: value}), pytest.raises(OptionError) as caught:
        setting(name)
    return str(caught.value)


def test_the_texts_say_what_is_needed():
    assert text_of("hardware", 3) == (
        "cpcompile.config.hardware is 3; needed the name of a profile, the path of a "
        '.json file, or "auto"'
    )
    assert text_of("step_kernel", "cudnn") == (
        "cpcompile.config.step_kernel is 'cudnn'; needed one of 'auto', 'triton', "
        "'aten_flash', 'aten_math'"
    )
