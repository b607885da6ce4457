"""A redirected log has whole lines at a bounded rate; a terminal has a bar."""

import io

from fastjax.train.progress import Progress


def lines_of(progress, steps):
    for step in steps:
        progress.step()
        progress.logged({"step": step, "loss": 0.54671, "tokens_per_second": 119.6})
    progress.evaluated({"step": steps[-1], "eval_loss": 1.25})
    progress.close()


def test_without_a_terminal_lines_are_plain_and_few():
    out, now = io.StringIO(), iter([0.0, 1.0, 2.5, 3.5, 4.0])
    lines_of(Progress(5, stream=out, clock=lambda: next(now)), [1, 2, 3, 4, 5])
    assert out.getvalue().splitlines() == [
        "step 1/5 loss 0.5467 120 tokens/s",
        "step 4/5 loss 0.5467 120 tokens/s",
        "step 5/5 loss 0.5467 120 tokens/s",
        "step 5/5 eval_loss 1.2500",
    ]
    assert "\r" not in out.getvalue()


def test_a_loss_of_no_target_is_a_dash():
    out = io.StringIO()
    Progress(1, stream=out).logged({"step": 1, "loss": None, "tokens_per_second": 1.0})
    assert out.getvalue() == "step 1/1 loss - 1 tokens/s\n"


def test_a_terminal_has_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    lines_of(Progress(2, stream=out), [1, 2])
    assert "\r" in out.getvalue() and "2/2" in out.getvalue() and "eval_loss 1.2500\n" in out.getvalue()
