"""Names of tensors without the prefixes of wrappers, and their digests."""

import pytest
from hypothesis import given, strategies as st

from averaging.common.tensor_names import (
    contradict,
    digest_of_names,
    first_other_name,
    is_placeholder,
    without_wrappers,
)

PLAIN = ["0.weight", "0.bias", "1.running_mean"]


@pytest.mark.parametrize(
    "wrapped",
    [
        PLAIN,
        [f"module.{name}" for name in PLAIN],
        [f"_orig_mod.{name}" for name in PLAIN],
        [f"_orig_mod.module.{name}" for name in PLAIN],
        [f"module._orig_mod.{name}" for name in PLAIN],
        [f"module.module.{name}" for name in PLAIN],
        ["0._fsdp_wrapped_module.weight", "0._fsdp_wrapped_module.bias", "1.module.running_mean"],
        ["0._checkpoint_wrapped_module.weight", "0._checkpoint_wrapped_module.bias", "_forward_module.1.running_mean"],
    ],
)
def test_a_model_has_the_same_names_with_wrappers_and_without(wrapped: list[str]) -> None:
    assert without_wrappers(wrapped) == PLAIN
    assert digest_of_names(wrapped) == digest_of_names(PLAIN)


PARTS = st.sampled_from(["module", "a", "b", "weight"])
TREES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: ".".join([*parts, "w"])), unique=True)


@given(TREES, st.sampled_from(["module.", "_orig_mod.", "module._orig_mod."]))
def test_names_stay_different_and_a_wrapper_changes_nothing(names: list[str], wrapper: str) -> None:
    plain = without_wrappers(names)
    assert len(set(plain)) == len(names)
    assert without_wrappers(wrapper + name for name in names) == plain == without_wrappers(plain)


def test_tensors_without_names_say_nothing() -> None:
    assert is_placeholder("tensor_3")
    assert is_placeholder("exp_avg/group0.param12")
    assert not is_placeholder("0.weight")
    assert digest_of_names(["tensor_0", "tensor_1"]) == ""
    unnamed = digest_of_names(["group0.param0", "buffer/mean", "buffer/var"])
    assert contradict(unnamed, digest_of_names(["group0.param0", "buffer/var", "buffer/mean"]))
    assert not contradict(unnamed, digest_of_names(["weight", "buffer/var", "buffer/mean"]))
    assert not contradict(unnamed, "")
    assert not contradict("", unnamed)


def test_the_first_other_name_is_told() -> None:
    assert first_other_name(["a", "b"], ["module.a", "module.c"]) == ("b", "c")
    assert first_other_name(["a", "tensor_1"], ["tensor_0", "b"]) is None
