"""Does a run fit a GPU, and how fast will it be? Answered without the GPU."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from fastjax.cli import Options, run_command
from fastjax.errors import UserError
from fastjax.settings import setting
from fastjax.train.config import TrainConfig


@dataclasses.dataclass
class PlanConfig(TrainConfig):
    """A training run's settings, and the GPU that it is planned for; data and output_dir are not needed."""

    model: str = setting("", "HF folder, hub id or .gguf file; or llama3-8b, llama3.1-8b, llama3-70b, llama2-7b, ...")
    gpu: str = setting("", "A100, RTX 4090, H200 or B200")
    longest: bool = setting(False, "find the longest row and the largest batch that fit")

    def validate(self) -> None:
        """Raises: UserError for a missing or impossible setting."""
        from fastjax.gpu_targets import TARGETS

        if self.gpu not in TARGETS:
            given = f"gpu={self.gpu!r} is unknown" if self.gpu else "gpu is missing"
            raise UserError(f"{given}; give one of {', '.join(TARGETS)}")
        if self.grad_compression != "none":
            raise UserError(
                f"grad_compression={self.grad_compression}: a plan does not count the errors that a run keeps; "
                "leave it out, and add 4 bytes for each trained number of a device and a part of that"
            )
        dataclasses.replace(self, data=self.data or "-", output_dir=self.output_dir or "-")._validate_run()

    def _validate_run(self) -> None:
        super().validate()


def plan(config: PlanConfig, options: Options) -> None:
    """Print the peak and its parts, the policy, the estimated speed, and with --longest what would just fit."""
    config.validate()
    from fastjax.train.plan.report import make_report

    report = make_report(config, options.given)
    print(json.dumps(report.to_dict()) if options.json else report)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.plan`; returns the exit code."""
    return run_command(PlanConfig, plan, argv, prog="fastjax plan", description=__doc__ or "", passed_over=TrainConfig)


if __name__ == "__main__":
    sys.exit(main())
