"""The outbox in Django's admin. These modules show pages and call other packages, which do the reading and the acts."""

from outbox.admin import check_backs, dead, deferred, gaps, inbox, messages, topics
from outbox.admin.about import MessagesAboutMixin

__all__ = ["MessagesAboutMixin", "check_backs", "dead", "deferred", "gaps", "inbox", "messages", "topics"]
