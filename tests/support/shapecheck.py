"""The checker of annotations that pytest applies to semidice: beartype, with an int good for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
