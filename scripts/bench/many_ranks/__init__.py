"""What the questions about many ranks share: processes that are one rank each, and a thousand simulated ones."""
