"""What every measurement shares: inputs, fresh processes, the page cache, raw figures and their tables."""
