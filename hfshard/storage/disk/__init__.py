"""System calls: durable writes, direct I/O, locks, and files that are safe to open."""
