"""A folder for PYTHONPATH: every Python that finds it there turns hfshard on."""
