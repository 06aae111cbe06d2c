"""A console for ulak: the page of ulak.report(), live, with a search for messages and an administrator's actions."""
