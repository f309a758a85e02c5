"""Executors of the copy plan: files to ranks, ranks to files, ranks to a module in memory, files to files."""
