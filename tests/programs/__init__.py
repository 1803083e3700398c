"""Programs that people use, each with real models: they save and load through hfshard, and stock ones read it."""
