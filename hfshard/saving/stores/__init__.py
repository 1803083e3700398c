"""How files get into a store, and how a checkpoint there replaces another one."""
