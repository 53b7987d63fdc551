"""The mathematics of the two texts: read block, attention, feedforward, norms, positions, gpt."""
