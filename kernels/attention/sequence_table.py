"""The table of blocks of packed sequences, for host and device: see sequence_blocks.py."""

FIELDS = 5  #: of a row: q_end, q_len, k_end, k_len, block
PITCH = 8  #: int32 numbers from row to row
