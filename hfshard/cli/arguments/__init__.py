"""The commands of `hfshard`, in groups, and their arguments."""
