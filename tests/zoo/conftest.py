"""The saved zoo, for the tests of what compares it."""

from tests.pretrained.conftest import modules_cache, quiet, saves

__all__ = ["modules_cache", "quiet", "saves"]
