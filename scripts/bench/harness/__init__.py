"""Parts that every question shares: inputs, fresh processes, raw figures and tables."""
