"""Memory of the learner and of an engine, on a GPU or in a CPU process."""
