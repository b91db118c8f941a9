"""The command line's training side: configuration, data, model, optimizer, loop, checkpoints, comparison, doctor."""
