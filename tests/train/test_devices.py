"""What a CPU means for speed is said once, to those who did not choose."""

import pytest

from fastjax.devices import note_slow_dtype


@pytest.mark.parametrize(
    ("dtype", "given", "said"),
    [("bfloat16", {"model"}, True), ("bfloat16", {"model", "dtype"}, False), ("float32", {"dtype"}, False)],
)
def test_bfloat16_that_nobody_asked_for_on_a_cpu_is_noted(capsys, dtype, given, said):
    note_slow_dtype(dtype, given)
    note = "note: bfloat16 is slow on a CPU; --dtype float32 is faster there\n"
    assert capsys.readouterr().err == (note if said else "")
