"""Where cases come from: images and raters' masks, drawn from files or from a model whose truth is known."""
