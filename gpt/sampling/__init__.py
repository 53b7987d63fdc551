"""Text out: from logits to characters."""
