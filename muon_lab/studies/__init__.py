"""One question a module: axes in, one row out."""
