"""Recorded and synthetic runs as Parquet files, and their replay under any policy; needs the extra ``trace``."""

from edgexpert.core.errors import UserError

try:
    import pyarrow  # noqa: F401
except ImportError:
    raise UserError("traces need pyarrow; install it with: pip install 'edgexpert[trace]'") from None
