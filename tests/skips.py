"""Reasons for a skip that are tolerated in CI too: they lie in the place, not in what is installed.

A test skips with the constant, ``pytest.skip(skips.A_GPU)``; ``conftest.py`` knows it from there.
"""

NO_TINY_SHAKESPEARE = "tiny Shakespeare is not beside the repository"  # test_entropy.py
A_GPU = "this machine has a GPU"  # test_train_cli.py

TOLERATED = {NO_TINY_SHAKESPEARE, A_GPU}
