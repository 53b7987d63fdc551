"""Text in: reading, encoding, and which characters a step sees."""
