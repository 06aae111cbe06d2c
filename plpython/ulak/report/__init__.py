"""The report: one page of HTML that shows how ulak is doing."""
