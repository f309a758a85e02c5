"""What both loops share: schedule, learning rate, checkpoints, signals, outputs, evaluation."""
