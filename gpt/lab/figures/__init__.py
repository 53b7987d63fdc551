"""The lab's figures: data in, one figure out, as SVG text or, with ``.png``, as a PNG file.

looks.py     colours and names of arms
drawing.py   how: canvas, axes, legend, SVG and PNG
ends.py      how runs ended: loss bands, loss against the learning rate, the phase map
steps.py     what happened on the way: any probe against the step, the gradients' heat map
depth.py     what a model is along its depth: gradients by block and by depth, the stream
"""

from gpt.lab.figures.depth import gradient_by_block, gradient_by_depth, stream_growth
from gpt.lab.figures.drawing import Drawn
from gpt.lab.figures.ends import loss_against_rate, loss_bands, phase_map
from gpt.lab.figures.looks import Curve, Ended, Seeds, colours
from gpt.lab.figures.steps import against_step, branch_over_skip, gradient_heat, spread

__all__ = [
    "Curve",
    "Drawn",
    "Ended",
    "Seeds",
    "against_step",
    "branch_over_skip",
    "colours",
    "gradient_by_block",
    "gradient_by_depth",
    "gradient_heat",
    "loss_against_rate",
    "loss_bands",
    "phase_map",
    "spread",
    "stream_growth",
]
