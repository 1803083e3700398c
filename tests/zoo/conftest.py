"""The saved zoo, for the tests of what compares it."""

from tests.models.conftest import own_modules_cache, quiet, saves

__all__ = ["own_modules_cache", "quiet", "saves"]
