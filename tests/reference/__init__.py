"""The frozen NumPy reference, its golden arrays, and the script that made them."""
