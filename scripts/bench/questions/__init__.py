"""The questions, one module each: peers, phases and table."""
