"""The page of ulak.report()."""
