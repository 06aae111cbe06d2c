"""The worker: claims, delivers, settles and commits until its time is over; a steady pipeline, not batches."""

from __future__ import annotations
