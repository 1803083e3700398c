"""The tests of hfshard; a package, so that `tests.crash` is ours and no installed `tests`."""
