"""Training: one fold (`engine`), all of them (`crossvalidation`), several processes (`distributed`)."""
