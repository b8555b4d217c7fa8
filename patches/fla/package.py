"""Which flash-linear-attention releases the adapters understand."""

IMPORT_NAME = "fla"
#: fla-core carries the ops and modules; flash-linear-attention adds layers and models at the same version.
DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
SUPPORTED = ">=0.5.2,<0.7"
