"""``compare.py demo``: Post-LN needs warm-up where Pre-LN does not, in two minutes."""

from gpt.commandline import run_config, run_name
from gpt.lab.arms import Arm
from gpt.lab.commandline import DemoCommand
from gpt.lab.run import Experiment, conduct

WARMUP = 100
"""Steps; half the run where it is shorter than two of these, and one at least."""


def main(command: DemoCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    warmup = max(1, min(WARMUP, base.training.steps // 2))
    arms = [
        Arm(f"{position}-w{steps}", {"norm_position": position, "warmup_steps": steps})
        for position in ("post", "pre")
        for steps in (0, warmup)
    ]
    post, post_warm, pre, pre_warm = (arm.name for arm in arms)
    experiment = Experiment(
        title=f"Post-LN and Pre-LN, without and with warm-up, on {run_name(command)}",
        arms=arms,
        base=base,
        seeds=range(base.training.seed, base.training.seed + command.seeds),
        margin=command.margin,
        pairs=[(post, post_warm), (pre, pre_warm), (post, pre), (post_warm, pre_warm)],
        cautions=False,  # it is their demonstration
    )
    return conduct(experiment, command, "demo", "demo")
