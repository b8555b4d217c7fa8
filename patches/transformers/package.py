"""Which transformers releases the adapters understand."""

IMPORT_NAME = "transformers"
DISTRIBUTIONS = ("transformers",)
SUPPORTED = ">=5.17,<5.25"
