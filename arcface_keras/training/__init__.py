"""Parts of a training: schedules, optimizer, batches, monitors, checkpoints and the loop over them."""
