"""The worker: claims, delivers and settles until its time is over."""
