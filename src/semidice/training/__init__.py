"""Training: one fold (`engine`, `folds`), a grid (`jobs`, `grid`), what is handed down (`context`)."""
