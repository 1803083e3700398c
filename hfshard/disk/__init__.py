"""System calls and bytes on disk."""
