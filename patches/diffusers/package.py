"""Which diffusers releases the adapters understand."""

IMPORT_NAME = "diffusers"
DISTRIBUTIONS = ("diffusers",)
SUPPORTED = ">=0.42,<0.43"
