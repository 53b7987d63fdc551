"""The comparison: arms that differ in one thing, trained alike."""
