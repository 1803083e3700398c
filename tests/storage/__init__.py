"""Tests of hfshard.storage, file by file."""
