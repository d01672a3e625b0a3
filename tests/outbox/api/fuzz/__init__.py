"""Check-backs by the thousand: what is asked, what is right, and what a stranger may send."""
