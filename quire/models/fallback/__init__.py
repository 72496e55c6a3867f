"""Decoders without a row of their own: transformers' module, with quire's attention, products, norms and experts in it.

`model.py` is the class that the registry's row "*" names. `construct.py` builds transformers' module without weights,
`probe.py` goes through one step of it with stand-ins for the weights (`stand_ins.py`), to find out what each layer's
attention computes (`attention.py`, `masks.py`) and which operations of torch's treat tokens one by one
(`operations.py`). `parts.py` then puts quire's layers in the places of transformers', `exact.py` does what torch would
not do row by row, and `names.py` says which tensors of the files become which parameters. What is not known to be
right is refused, by name.
"""
