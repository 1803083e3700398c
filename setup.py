"""Build hfshard; all metadata are in setup.cfg."""

from setuptools import setup

setup()
