"""Tests of hfshard/viewing/diff/."""
