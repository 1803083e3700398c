"""Tests of `hfshard.distributed.liveness`."""
