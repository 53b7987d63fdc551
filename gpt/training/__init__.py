"""The run: optimisers, schedules, the loop, checkpoints and metrics."""
