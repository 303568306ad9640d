"""DFlash: a few layers that fill a block of tokens in one run; features of the target are keys and values in each."""
