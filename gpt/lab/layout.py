"""The charts of TensorBoard's tab Custom Scalars, in categories that have something to show."""

import re
from collections.abc import Iterable, Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)

OUTCOME = {"Validation loss, every run": "loss/val", "Training loss, every run": "loss/train"}
WHY = {
    "Change of log-probabilities since step 0 (dF, rms)": "probe/dF",
    "rms of branch / rms of skip (median over sublayers)": "probe/branch_over_skip",
    "Gradient of W_out, first block / last block": "probe/grad_first_over_last",
    "Gradient norm": "probe/grad_total",
    "sd of predicted probabilities over positions": "probe/pred_std",
}
SIGNAL = {
    "Gradient of W_out, block by block": r"probe/grad_W_out_\d+",
    "rms of the residual stream, sublayer by sublayer": r"probe/stream_rms_\d+",
    "rms of branch / rms of skip, sublayer by sublayer": r"probe/branch_over_skip_\d+",
    "Gradient norm, block by block": r"grad_norm/block_\d+",
    "rms of the residual stream, block by block": r"stream_rms/block_\d+",
}
SWEEP = {
    "Median of the final losses; step: place of the learning rate (text: rates)": "sweep/.*/median",
    "Seeds that failed; step: place of the learning rate (text: rates)": "sweep/.*/failed",
}
"""Chart -> the tags it shows; TensorBoard matches them as regular expressions."""


def layout(bands: Sequence[tuple[str, str, str]], tags: Iterable[str]) -> Summary:
    """``bands``: the tags (mean, lowest, highest) of each arm, all on one chart. ``tags``: of all
    runs.

    tensorboard's own function for this needs TensorFlow.
    """
    tags = set(tags)
    series = [
        MarginChartContent.Series(value=mean, lower=lowest, upper=highest)
        for mean, lowest, highest in bands
    ]
    title = (
        "Validation loss (nats per character): mean, lowest and highest of the seeds that did not "
        "fail; of all where all failed"
    )
    margin = [Chart(title=title, margin=MarginChartContent(series=series))] if series else []
    categories = {
        "1 Outcome": margin + _charts(OUTCOME, tags),
        "2 Why: first updates": _charts(WHY, tags),
        "3 Signal by depth": _charts(SIGNAL, tags),
        "4 Sweep": _charts(SWEEP, tags),
    }
    content = Layout(
        category=[
            Category(title=name, chart=charts) for name, charts in categories.items() if charts
        ]
    )
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[content.SerializeToString()],
        tensor_shape=TensorShapeProto(),
    )
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="custom_scalars"))
    tag = "custom_scalars__config__"
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=kind)])


def _charts(wanted: Mapping[str, str], tags: Iterable[str]) -> list[Chart]:
    return [
        Chart(title=title, multiline=MultilineChartContent(tag=[pattern + "$"]))
        for title, pattern in wanted.items()
        if any(re.fullmatch(pattern, tag) for tag in tags)
    ]
